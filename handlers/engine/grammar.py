"""Compiles grammars on a thread of their own, and masks the tokens that a grammar forbids, with llguidance.

docs/decisions/0042-grammars-by-llguidance.md has the reasons.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerFast

from handlers.engine.contract import JSON_OPTIONS, GrammarText
from handlers.errors import InvalidRequest, Overloaded
from handlers.settings.grammar import GrammarSettings
from handlers.worker.counters import Counters
from handlers.worker.limited_process import LimitedProcess, WorkTooCostly

if TYPE_CHECKING:  # loaded with the first grammar, because many workers need none
    from llguidance import LLMatcher, LLTokenizer

TOKENIZER_TIMEOUT_S = 60.0  # a vocabulary of 150,000 entries takes 2 s
MAX_REASON_CHARS = 300
_QUOTED = re.compile(r" *\d+ \| ")  # a line of a grammar in the library's error


class GrammarFailed(Exception):
    """Raised if an answer's grammar exceeds its limits or does not allow a token."""


class GrammarState:
    """The state of one answer in its grammar. One thread at a time. max_cpu_s: processor time for all of its masks."""

    def __init__(self, matcher: "LLMatcher", max_cpu_s: float) -> None:
        self._matcher = matcher
        self._max_cpu_s = self._left_s = max_cpu_s

    def mask(self) -> bytes:
        """Return a bit for each token, the lowest of a byte first: 1 if it may come next. Raises GrammarFailed."""
        begin = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._left_s -= time.thread_time() - begin
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))
        if self._left_s < 0:
            raise GrammarFailed(f"it takes more than {self._max_cpu_s:g} s of processor time")
        return mask

    def take(self, token: int) -> None:
        """Advance by this token. If the grammar does not allow it, later calls of `mask` raise."""
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """True if the answer is valid and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class Grammar:
    """A compiled grammar, which any number of answers may follow at a time. num_bytes: its memory."""

    def __init__(self, matcher: "LLMatcher", max_cpu_s: float, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._max_cpu_s = max_cpu_s

    def begin(self, tokens: Iterable[int] = ()) -> GrammarState:
        """Return the state of an answer that has these tokens already. Raises GrammarFailed if it cannot have them."""
        matcher = self._matcher.deep_copy()
        if not matcher.consume_tokens(list(tokens)):
            raise GrammarFailed(_reason(matcher.get_error()))
        return GrammarState(matcher, self._max_cpu_s)


class GrammarCompiler:
    """Compiles grammars for one model on a thread of its own, and caches them.

    The library does not limit the time and memory of every grammar, so each is first compiled in a limited process.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Iterable[int],
        vocabulary: int,
        settings: GrammarSettings,
        counters: Counters | None = None,
    ) -> None:
        """vocabulary: the number of the model's logits."""
        self._counters = counters or Counters()
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary = vocabulary
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._trial = LimitedProcess("grammar", settings.max_compile_cpu_s, settings.max_compile_bytes)
        self._lock = threading.Lock()
        self._vocabulary_trie: Future[LLTokenizer] | None = None
        self._compiled: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()

    def stop(self) -> None:
        """End the thread and the process."""
        self._thread.shutdown(cancel_futures=True)
        self._trial.stop()

    @property
    def is_supported(self) -> bool:
        """True if the model's tokenizer can be combined with grammars."""
        return isinstance(self._tokenizer, PreTrainedTokenizerFast)

    def compile(self, source: GrammarText) -> Grammar:
        """Return the compiled grammar. Any thread but the engine's.

        Raises InvalidRequest, with the reason, if it is refused; Overloaded if it waits too long for the vocabulary or
        for other grammars.
        """
        self._check_length(source)
        trie = self._await_vocabulary(source)
        compiling, is_reused = self._find(source, trie)
        grammar = self._await_grammar(source, compiling)
        if is_reused:
            self._counters.add("grammars_reused")
        return grammar

    def _check_length(self, source: GrammarText) -> None:
        limits = {"max_chars": self._settings.max_chars}
        if source.kind == "regex":
            limits["max_regex_chars"] = self._settings.max_regex_chars
        name, limit = min(limits.items(), key=itemgetter(1))
        if len(source.text) > limit:
            raise InvalidRequest(
                f"{source.field} has {len(source.text)} characters, more than {limit} (handler.grammar.{name})",
                param=source.field,
            )

    # `exception` instead of `result` below: a future's error that is raised again holds the frames of each request.

    def _await_vocabulary(self, source: GrammarText) -> "Future[LLTokenizer]":
        """Return the vocabulary, which has been read. The first call begins to read it."""
        with self._lock:
            if self._vocabulary_trie is None or _must_repeat(self._vocabulary_trie):
                self._vocabulary_trie = self._thread.submit(self._read_vocabulary)
            trie = self._vocabulary_trie
        try:
            unread = trie.exception(TOKENIZER_TIMEOUT_S)
        except TimeoutError:
            raise Overloaded("the model's vocabulary is still being read for grammars; try again later") from None
        if isinstance(unread, ValueError):
            raise InvalidRequest(
                "this model's tokenizer cannot be combined with a grammar, so its answers cannot follow one",
                param=source.field,
            ) from unread
        trie.result()  # raises any other error
        return trie

    def _await_grammar(self, source: GrammarText, compiling: "Future[Grammar]") -> Grammar:
        try:
            refusal = compiling.exception(self._settings.compile_timeout_s)
        except CancelledError:
            raise Overloaded("the compiled grammar was evicted for others; try again later") from None
        except TimeoutError:
            if compiling.running():
                raise InvalidRequest(
                    f"{source.field} takes longer than {self._settings.compile_timeout_s:g} s to compile; simplify it",
                    param=source.field,
                ) from None
            raise Overloaded("other grammars are being compiled; try again later") from None
        if isinstance(refusal, ValueError):
            raise InvalidRequest(f"{source.field} is refused: {refusal}", param=source.field) from refusal
        return compiling.result()

    def _find(self, source: GrammarText, trie: "Future[LLTokenizer]") -> "tuple[Future[Grammar], bool]":
        """Return the compiled grammar, perhaps later, and whether the cache has it already."""
        key = source.kind, source.text
        with self._lock:
            compiling = self._compiled.get(key)
            is_reused = compiling is not None and not _must_repeat(compiling)
            if compiling is None or not is_reused:
                compiling = self._compiled[key] = self._thread.submit(self._compile, source, trie)
            self._compiled.move_to_end(key)
            while len(self._compiled) > self._settings.max_cached:
                self._compiled.popitem(last=False)[1].cancel()
            return compiling, is_reused

    def _make_room(self, num_bytes: int) -> None:
        """Drop the compiled grammars that were used least recently until one of this size fits."""
        with self._lock:
            sizes = {key: each.result().num_bytes for key, each in self._compiled.items() if _has_result(each)}
            used = sum(sizes.values()) + num_bytes
            for key, size in sizes.items():
                if used <= self._settings.max_cached_bytes:
                    return
                del self._compiled[key]
                used -= size

    def _read_vocabulary(self) -> "LLTokenizer":
        """Read the tokenizer's vocabulary. Raises ValueError if it cannot be combined with grammars."""
        from llguidance.hf import from_tokenizer

        size = max(self._vocabulary, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_token_ids or None)
        except (MemoryError, OSError):
            raise
        except Exception as exc:  # the libraries raise errors of every kind
            raise ValueError("the tokenizer has no form that llguidance knows") from exc

    def _compile(self, source: GrammarText, trie: "Future[LLTokenizer]") -> Grammar:
        """Compile a grammar. Raises ValueError with the reason if it is refused."""
        from llguidance import LLMatcher, LLParserLimits

        settings = self._settings
        limits: dict[str, Any] = {
            "max_grammar_size": settings.max_symbols,
            "max_lexer_states": settings.max_states,
            "verbose_errors": False,
        }
        translated = _translate(source)
        try:
            tried = self._trial.ask({"grammar": translated, "limits": limits})
        except WorkTooCostly as exc:
            self._counters.add("grammars_exceeded")
            raise ValueError(str(exc)) from exc
        if "refused" in tried:
            self._counters.add("grammars_refused")
            raise ValueError(_reason(tried["refused"]))
        num_bytes = len(source.text) + tried["num_bytes"]
        self._make_room(num_bytes)
        matcher = LLMatcher(trie.result(), translated, log_level=0, limits=LLParserLimits(**limits))
        probe = matcher.deep_copy()  # some limits are only noticed at the first token
        mask = b"" if probe.is_error() else probe.compute_bitmask()
        if probe.is_error():
            raise ValueError(_reason(probe.get_error()))
        if not any(mask):
            raise ValueError("no answer can follow it")
        self._counters.add("grammars_compiled")
        return Grammar(matcher, settings.max_cpu_s, num_bytes)


def _must_repeat(work: "Future[Any]") -> bool:
    """Return True if a vocabulary was not read, or a grammar not compiled, for a reason that is not its own."""
    if not work.done() or work.cancelled():
        return work.cancelled()
    return not isinstance(work.exception(), ValueError | None)


def _has_result(compiling: "Future[Grammar]") -> bool:
    return compiling.done() and not compiling.cancelled() and compiling.exception() is None


def _translate(source: GrammarText) -> str:
    """Return the grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher

    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(source.text)
    return LLMatcher.grammar_from_json_schema(source.text, overrides=JSON_OPTIONS)


def _reason(error: str) -> str:
    """Return the library's reason on one line, without what it adds for its developers.

    Of the lines that it quotes from the grammar, only the marked one is part of the reason.
    """
    lines = error.replace("<non-verbose/>", "").splitlines()
    kept = [line for line, after in pairwise([*lines, ""]) if not _QUOTED.match(line) or after.strip() == "^"]
    return " ".join(" ".join(kept).split())[:MAX_REASON_CHARS]
