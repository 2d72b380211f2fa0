"""The dialect of vLLM's tokenize and detokenize, whose bodies are a completion's or a chat completion's prompt."""

from typing import Any

from handlers.chat.checks import is_int, read_flag
from handlers.chat.commands import Detokenize, Tokenize
from handlers.chat.dialects.chat_completions import parse_chat_completion
from handlers.chat.dialects.completions import parse_completion
from handlers.errors import InvalidRequest
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings

MAX_TOKENS = 1 << 17  # of a request


def parse_tokenize(incoming: Incoming, body: dict[str, Any], settings: RequestSettings) -> Tokenize:
    """Read a body with a `prompt` or with `messages`. Raises InvalidRequest, ContextTooLong."""
    parse = parse_chat_completion if "messages" in body else parse_completion
    prompt = {name: value for name, value in body.items() if name != "return_token_strs"}
    request = parse(incoming, prompt, settings)
    if request.more_prompts:
        raise InvalidRequest("'prompt' must be one text", param="prompt")
    return Tokenize(request=request, has_texts=read_flag(body, "return_token_strs"))


def parse_detokenize(body: dict[str, Any]) -> Detokenize:
    """Read a body with `tokens`. Raises InvalidRequest."""
    ids = body.get("tokens")
    if not isinstance(ids, list) or len(ids) > MAX_TOKENS or not all(is_int(each) and each >= 0 for each in ids):
        raise InvalidRequest(f"'tokens' must be a list of at most {MAX_TOKENS} token ids", param="tokens")
    unknown = set(body) - {"tokens", "model"}
    if unknown:
        raise InvalidRequest(f"detokenize has no field '{min(unknown)[:64]}'", param=min(unknown)[:64])
    return Detokenize(ids=tuple(ids))
