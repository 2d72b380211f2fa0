"""Converts token ids to text piece by piece; holds back partial characters and starts of stop strings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from torchmoor.wire.held_text import num_held
from torchmoor.wire.marked_text import ERROR_MARK

_ERROR_MARK = ERROR_MARK.decode()

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 64  # without text that is certain; all of them are decoded again with each further token


class Detokenizer:
    """Text of one answer as it grows.

    `push` returns what may be shown now. Text that may begin a stop string, or whose last character is incomplete, is
    held back until the next token decides; `finish` returns the rest. A character that stays incomplete for
    MAX_HELD_TOKENS is shown as it is: a client can bias an answer to tokens that never complete one.

    min_tokens: a stop string that ends within the text of this many first tokens does not count. added: the text of
    the last `push` or `finish`, whether or not it may be shown.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self._stop = stop
        self._min_tokens = min_tokens
        self._overlap = max((len(s) for s in stop), default=1) - 1  # of earlier text and a stop string
        self._num_unstopped = 0  # number of characters within which no stop string counts
        self._ids: list[int] = []
        # Ids from this index on are decoded again with each new one: some tokenizers add spaces by context.
        self._prefix = 0
        self._read = 0  # ids before this index are already in the text
        self._text = ""
        self._shown = 0
        self.added = ""
        self.is_stopped = False

    def text_of(self, token_id: int) -> str:
        """Return the text of one token alone, special tokens included."""
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    @property
    def text(self) -> str:
        """The answer's text so far, without the stop string."""
        return self._text

    @property
    def shown(self) -> str:
        """The text that `push` and `finish` have returned."""
        return self._text[: self._shown]

    def push(self, token_id: int) -> str:
        """Add a token. Return the text that has become certain. Sets `is_stopped` at a stop string."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        is_uncertain = len(after) <= len(before) or after.endswith(REPLACEMENT)
        if is_uncertain and len(self._ids) - self._read < MAX_HELD_TOKENS:
            self.added = ""
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._show(after[len(before) :])

    def finish(self) -> str:
        """Return the text that was held back."""
        before = self._decode(self._ids[self._prefix : self._read])
        rest = self._decode(self._ids[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._ids)
        return self._show(rest, is_last=True)

    def _show(self, new: str, *, is_last: bool = False) -> str:
        """Add to the text and return what may be shown: all but the beginning of a stop string, unless is_last."""
        self.added = new = new.replace(_ERROR_MARK, "")  # the byte that precedes an error at the end of a plain stream
        if self.is_stopped:
            return ""
        searched_from = max(0, len(self._text) - self._overlap)
        self._text += new
        if len(self._ids) <= self._min_tokens:
            self._num_unstopped = len(self._text)
        found = [(at + len(s), at) for s in self._stop if (at := self._find(s, searched_from)) >= 0]
        if found:  # the one that ends first, so that the result does not depend on token borders
            self.is_stopped = True
            self._text = self._text[: min(found)[1]]
        num_held = 0 if is_last or self.is_stopped else self._num_held()
        end = max(self._shown, len(self._text) - num_held)
        piece, self._shown = self._text[self._shown : end], end
        return piece

    def _find(self, stop: str, start: int) -> int:
        """Return where a stop string that counts begins, at `start` or after it; -1 if there is none."""
        return self._text.find(stop, max(start, self._num_unstopped + 1 - len(stop)))

    def _num_held(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        return max((num_held(self._text, each) for each in self._stop), default=0)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return the function that converts ids to text, without special tokens.

    If transformers adds nothing to the tokenizer's Rust function, that function is called directly, which takes a
    quarter of the time.
    """
    own, usual = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, usual) and (own.decode, own._decode) == (usual.decode, usual._decode):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
