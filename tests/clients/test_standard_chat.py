"""What LangChain asks of every chat model."""

from __future__ import annotations

from typing import Any

from langchain_tests.unit_tests import ChatModelUnitTests

from torchmoor.clients.langchain import ChatSagemakerEndpoint


class TestChatSagemakerEndpoint(ChatModelUnitTests):
    """Its standard suite. Tools and structured output are not offered, which it sees for itself."""

    @property
    def chat_model_class(self) -> type[ChatSagemakerEndpoint]:
        return ChatSagemakerEndpoint

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"endpoint_name": "llava", "endpoint_url": "http://127.0.0.1:9"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """Without an api_key: callers sign with AWS credentials."""
        return {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def supports_image_inputs(self) -> bool:
        return True
