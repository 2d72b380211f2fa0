"""LangChain's classes for endpoints; they need `pip install torchmoor[langchain]`.

ChatSagemakerEndpoint: a chat model that streams, with or without sessions. SagemakerAsyncEndpoint: an LLM whose
requests wait in a queue, for endpoints that scale to zero.
"""

from torchmoor.clients.langchain.async_endpoint import SagemakerAsyncEndpoint
from torchmoor.clients.langchain.chat import ChatSagemakerEndpoint, ChatSagemakerSession

__all__ = ["ChatSagemakerEndpoint", "ChatSagemakerSession", "SagemakerAsyncEndpoint"]
