"""Loads a checkpoint's tokenizer, and checks its tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from handlers.errors import InvalidRequest

TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path) -> Any:
    """Load a checkpoint's tokenizer. Raises errors of many kinds.

    Without a file for the vocabulary, transformers makes a tokenizer that knows only special tokens, with which a model
    gives wrong answers; that is a ValueError here. Tokenizers of bytes or characters have no such file.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    names = set(tokenizer.vocab_files_names.values())
    if names and not any((folder / name).is_file() for name in (TOKENIZER, *names)):
        raise ValueError("the tokenizer has no vocabulary: save it beside the model, too")
    return tokenizer


def check_known(ids: Sequence[int], num_tokens: float, tokenizer: Any, image_token_id: int | None = None) -> None:
    """Raise InvalidRequest for a token beyond the model's, which would end a GPU's process; images have no token."""
    if max(ids, default=0) < num_tokens:
        return
    unknown = next((token for token in ids if token >= num_tokens and token != image_token_id), None)
    if unknown is not None:
        token = tokenizer.convert_ids_to_tokens(unknown)
        raise InvalidRequest(f"the tokenizer has a token {token!r}, which the model does not know: leave it out")
