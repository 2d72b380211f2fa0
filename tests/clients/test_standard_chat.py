"""LangChain's standard tests for chat models."""

from __future__ import annotations

from typing import Any

from langchain_tests.unit_tests import ChatModelUnitTests

from torchmoor.clients.langchain import ChatSagemakerEndpoint


class TestChatSagemakerEndpoint(ChatModelUnitTests):
    """Run the standard suite; it detects that tools and structured output are not supported."""

    @property
    def chat_model_class(self) -> type[ChatSagemakerEndpoint]:
        return ChatSagemakerEndpoint

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"endpoint_name": "llava", "endpoint_url": "http://127.0.0.1:9"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        """Omit api_key: callers sign with AWS credentials."""
        return {"temperature": 0, "max_tokens": 100, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def supports_image_inputs(self) -> bool:
        return True
