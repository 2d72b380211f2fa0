"""Loads a checkpoint's tokenizer."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

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
