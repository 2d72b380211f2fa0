"""LangChain's messages converted to and from an endpoint's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGenerationChunk

from torchmoor.clients.pieces import Piece

ROLES = ("system", "user", "assistant")


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert a conversation of texts and images to OpenAI's form.

    Raises ValueError for other content, such as audio, video, files or tool calls.
    """
    converted = convert_to_openai_messages(list(messages))
    assert isinstance(converted, list)
    for message in converted:
        if message["role"] not in ROLES:
            raise ValueError(f"a message of the role {message['role']!r} is not supported: only {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise ValueError("calls of tools are not supported")
        if isinstance(message["content"], list):
            for part in message["content"]:
                if part["type"] not in ("text", "image_url"):
                    raise ValueError(f"{part['type']} is not supported: a message may have texts and images")
    return converted


def texts_and_images(message: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the texts and the image addresses of one of `openai_messages`."""
    content = message["content"]
    if isinstance(content, str):
        return [content], []
    texts = [part["text"] for part in content if part["type"] == "text"]
    return texts, [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


def chunk_of(piece: Piece, model_name: str) -> ChatGenerationChunk:
    """Convert a piece of an answer to LangChain's chunk."""
    usage = None
    if piece.usage is not None:
        asked, answered = piece.usage.prompt_tokens or 0, piece.usage.answer_tokens
        usage = UsageMetadata(input_tokens=asked, output_tokens=answered, total_tokens=asked + answered)
    metadata: dict[str, Any] = {}
    if piece.finish_reason is not None:
        metadata = {"finish_reason": piece.finish_reason, "model_name": model_name}
    token = {"token_ids": piece.token_id, "logprobs": piece.logprob}
    return ChatGenerationChunk(
        message=AIMessageChunk(content=piece.text, usage_metadata=usage, response_metadata=metadata),
        # Lists, which LangChain joins when it merges chunks.
        generation_info={name: [value] for name, value in token.items() if value is not None} or None,
    )
