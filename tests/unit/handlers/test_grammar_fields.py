"""Answers that follow a grammar: on the engine with many schemas, and through the service in each dialect."""

import gc
import json
import random
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, hf

from benchmarks.grammar_schemas import SCHEMAS
from handlers.chat.grammar_fields import read_schema
from handlers.engine import grammar as grammar_module
from handlers.engine.builtin.engine import Engine
from handlers.engine.builtin.kv_cache import SequenceCache, cache_shape
from handlers.engine.builtin.pace import Pace
from handlers.engine.builtin.runner import ModelRunner
from handlers.engine.builtin.sampler import Sampler, choose_tokens
from handlers.engine.builtin.scheduler import Scheduler
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import (
    JSON_OPTIONS,
    AnswerRequest,
    FinishReason,
    GrammarText,
    SamplingParams,
    TokenEvent,
)
from handlers.engine.grammar import GrammarCompiler, GrammarFailed, GrammarState
from handlers.errors import InvalidRequest, Overloaded
from handlers.settings.grammar import GrammarSettings
from handlers.worker.limited_process import LimitedProcess
from tests.waiting import wait_until

PROMPT = [1, 5, 9, 12]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OPENAI_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
SAMPLED = {"temperature": 1.2, "seed": 11}


def json_grammar(schema: Any) -> GrammarText:
    return GrammarText("json_schema", json.dumps(schema), "schema")


class SentGrammar(GrammarText):
    """A grammar that can be referred to weakly, as its base cannot."""


class Rows:
    """Sequences that the test runs step by step in one batch."""

    def __init__(self, model: Any, max_rows: int = 8) -> None:
        runner = ModelRunner(model, cache_shape(model).num_bytes(16_384), max_rows)
        self._model = model
        self._engine = Engine(runner, Scheduler(max_rows, Pace(256, 1e9)), 1)

    def run(self, *params: SamplingParams) -> list[tuple[list[int], TokenEvent]]:
        """Return each row's tokens and its last event."""
        events: list[list[TokenEvent]] = [[] for _ in params]
        pool = self._engine.runner.pool
        for own, heard in zip(params, events, strict=True):
            cache = SequenceCache(pool)
            cache.pin()
            cache.match(PROMPT)

            def hear(event: TokenEvent, heard: list[TokenEvent] = heard, cache: SequenceCache = cache) -> bool:
                heard.append(event)
                if event.finish_reason is not None or event.error is not None:
                    cache.unpin()
                return True

            request = AnswerRequest(prompt=PROMPT, images=[], params=own, deadline=float("inf"), on_event=hear)
            self._engine.admit(TokenSequence(cache, request))
        while self._engine.scheduler.all():
            self._engine.step()
        return [([e.token_id for e in heard if e.token_id is not None], heard[-1]) for heard in events]

    def text(self, tokens: list[int]) -> str:
        return str(self._model.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def rows(tiny_llava: Any) -> Rows:
    return Rows(tiny_llava)


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(schemas=st.lists(SCHEMAS, min_size=8, max_size=8), seed=st.integers(0, 2**32))
def test_every_answer_is_valid_by_its_schema(
    rows: Rows, compiler: GrammarCompiler, schemas: list[Any], seed: int
) -> None:
    """Eight rows of one batch, sampled at a high temperature or greedily, follow their eight schemas."""
    params = [
        SamplingParams(
            max_new_tokens=200,
            grammar=compiler.compile(json_grammar(schema)),
            do_sample=number % 4 != 0,
            temperature=2.0,
            top_k=40 if number % 4 == 1 else None,
            top_p=0.95 if number % 4 == 2 else None,
            seed=seed + number,
        )
        for number, schema in enumerate(schemas)
    ]

    for schema, (tokens, last) in zip(schemas, rows.run(*params), strict=True):
        assert last.error is None
        if last.finish_reason is FinishReason.EOS:
            jsonschema.Draft202012Validator(schema).validate(json.loads(rows.text(tokens)))
        else:  # some patterns and formats have no longest text
            assert len(tokens) == 200


def test_other_rows_get_the_tokens_that_they_get_alone(rows: Rows, compiler: GrammarCompiler) -> None:
    """A grammar changes neither the tokens nor the random numbers of the rows beside it, nor do they change its own."""
    grammar = compiler.compile(json_grammar(PERSON))
    kinds = [
        SamplingParams(max_new_tokens=24, do_sample=True, seed=3),
        SamplingParams(max_new_tokens=24, do_sample=True, seed=3, grammar=grammar),
        SamplingParams(max_new_tokens=24),
        SamplingParams(max_new_tokens=24, grammar=grammar, repetition_penalty=1.3),
    ]

    together = [tokens for tokens, _ in rows.run(*kinds)]

    assert together == [rows.run(kind)[0][0] for kind in kinds]


def test_answer_is_continued_by_its_tokens(rows: Rows, compiler: GrammarCompiler) -> None:
    """A state that starts from an answer's tokens allows the same next tokens as the answer's own state."""
    grammar = compiler.compile(json_grammar(PERSON))
    [(tokens, _)] = rows.run(SamplingParams(max_new_tokens=60, do_sample=True, seed=5, grammar=grammar))
    state = grammar.begin()
    for number, token in enumerate(tokens):
        assert grammar.begin(tokens[:number]).mask() == state.mask()
        state.take(token)

    assert state.is_complete
    with pytest.raises(GrammarFailed):
        grammar.begin([*tokens, tokens[0]])


def test_an_answer_that_leaves_its_grammar_is_not_complete(compiler: GrammarCompiler) -> None:
    """A token that the grammar refuses ends the answer with an error; it is not reported as complete."""
    state = compiler.compile(json_grammar(PERSON)).begin()
    allowed = int.from_bytes(state.mask(), "little")
    state.take(next(token for token in range(100) if not allowed >> token & 1))

    assert not state.is_complete
    with pytest.raises(GrammarFailed):
        state.mask()


@pytest.mark.parametrize("bias", [-100.0, 100.0])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_grammar_is_followed_whatever_tokens_a_bias_excludes(
    rows: Rows, compiler: GrammarCompiler, tiny_llava: Any, bias: float, do_sample: bool
) -> None:
    """A token that the bias bans is chosen if the grammar allows no other."""
    tokens = [token for token in range(len(tiny_llava.tokenizer)) if rows.text([token]) in ("a", "ac", "c")]
    params = SamplingParams(
        max_new_tokens=9,
        grammar=compiler.compile(GrammarText("regex", "(a|b)c", "grammar")),
        logit_bias=tuple((token, bias) for token in tokens),
        do_sample=do_sample,
        temperature=1e6,
    )

    [(answer, last)] = rows.run(params)

    assert last.error is None
    assert rows.text(answer) == ("ac" if bias > 0 else "bc")


def test_a_repeated_step_asks_the_grammar_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is repeated for lack of memory queries the grammar once, because the answer's time is limited."""
    params = SamplingParams(max_new_tokens=9, grammar=compiler.compile(json_grammar(PERSON)))
    sampler = Sampler(params, (), torch.device("cpu"))
    masks: list[bytes] = []
    find_mask = GrammarState.mask

    def counted(state: GrammarState) -> bytes:
        masks.append(find_mask(state))
        return masks[-1]

    monkeypatch.setattr(GrammarState, "mask", counted)

    for number in (1, 2):
        sampler.prepare()
        sampler.prepare()
        assert len(masks) == number
        [token], _ = choose_tokens(torch.zeros(1, len(masks[-1]) * 8), [sampler])
        assert masks[-1][token // 8] >> token % 8 & 1


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"not": {"type": "string"}}', "not"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/schema"}', "does not fetch"),
        ("json_schema", '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
        ("json_schema", '{"enum": []}', "empty"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: missing", "missing"),
        ("lark", f'start: "{"x" * 70_000}"', "more than 65536 .handler.grammar.max_chars"),
        ("regex", "x" * 70_000, "more than 4096 .handler.grammar.max_regex_chars"),
        ("regex", "x" * 4097, "has 4097 characters, more than 4096 .handler.grammar.max_regex_chars"),
    ],
)
def test_refused_grammars_say_why(compiler: GrammarCompiler, kind: Any, text: str, reason: str) -> None:
    """The library's reason is in the error; a schema can neither switch keywords off nor make the server fetch."""
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiler.compile(GrammarText(kind, text, "parameters.grammar.value"))

    assert caught.value.param == "parameters.grammar.value"


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_refused_grammar_that_is_sent_again_and_again_takes_no_memory(
    tiny_llava: Any, monkeypatch: Any, has_tokenizer: bool
) -> None:
    """The compiler remembers why it refuses a grammar, or all of them, and nothing of the requests."""
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings())
    if not has_tokenizer:
        monkeypatch.setattr(hf, "from_tokenizer", lambda *args, **options: (_ for _ in ()).throw(Exception("unknown")))
    requests: list[weakref.ref[SentGrammar]] = []
    try:
        for _ in range(3):
            sent = SentGrammar("regex", "(a", "parameters.grammar.value")
            requests.append(weakref.ref(sent))
            with pytest.raises(InvalidRequest):
                compiler.compile(sent)
            del sent
        gc.collect()
    finally:
        compiler.stop()

    assert [each() for each in requests[1:]] == [None, None]


def test_compiling_has_a_time_limit(tiny_llava: Any) -> None:
    """A grammar that takes too long is refused; if others kept the compiler busy, the error says so."""
    compiler = GrammarCompiler(
        tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings(compile_timeout_s=1e-9)
    )
    slow = json_grammar({"enum": [f"value {number}" for number in range(3000)]})
    try:
        with pytest.raises((InvalidRequest, Overloaded), match=r"takes longer|try again"):
            compiler.compile(slow)
    finally:
        compiler.stop()


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "integer", "multipleOf": 999_983}),  # an automaton with a state for each remainder
        GrammarText("regex", "(ab|cd)?" * 8000, "schema"),  # 245 MB
        json_grammar({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(1, 14)]}),  # 10 s
    ],
)
def test_grammars_that_need_too_much_are_refused(tiny_llava: Any, grammar: GrammarText) -> None:
    """A small grammar that would fill the memory or take minutes ends another process; the next one is compiled."""
    patient = GrammarSettings(compile_timeout_s=100, max_regex_chars=65_536)
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, patient)
    try:
        compiler.compile(json_grammar({"const": "first"}))
        before = psutil.Process().memory_info().rss
        with pytest.raises(InvalidRequest, match="it needs more than 1 s or 64 MiB"):
            compiler.compile(grammar)
        assert psutil.Process().memory_info().rss - before < 32 << 20
        assert not compiler.compile(json_grammar({"const": "second"})).begin().is_complete
    finally:
        compiler.stop()


def test_kept_grammars_have_a_bound_in_bytes(tiny_llava: Any) -> None:
    """The cache of grammars is limited in bytes; the least recently used ones are compiled again when needed."""
    settings = GrammarSettings(max_cached_bytes=12 << 20, compile_timeout_s=100)
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, settings)
    names = [[f"{number}-{place}" for place in range(900)] for number in range(6)]
    large = [json_grammar({"properties": {name: {"type": "string"} for name in each}}) for each in names]
    try:
        compiled = [compiler.compile(each) for each in large]
        last, first = compiler.compile(large[-1]), compiler.compile(large[0])
    finally:
        compiler.stop()

    assert max(each.num_bytes for each in compiled) > 1 << 20
    assert last is compiled[-1]
    assert first is not compiled[0]


def test_answers_that_find_their_grammar_in_the_cache_are_counted(make_client: Any) -> None:
    client = make_client()
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}

    for _ in range(3):
        assert client.call(chat(response_format=schema)).status == 200
        assert client.call(chat(response_format=wrong)).status == 400

    counts = client.service.status()["grammars"]
    assert counts == {"compiled": 1, "reused": 2, "refused": 1, "exceeded": 0}


def test_a_grammar_that_leaves_the_cache_while_it_waits_is_refused(tiny_llava: Any, monkeypatch: Any) -> None:
    """The client of a grammar that leaves the cache while it waits is asked to retry; its successor is compiled."""
    own = GrammarSettings(max_cached=1, compile_timeout_s=100)
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, own)
    compiler.compile(json_grammar({"const": "before"}))
    is_tried, may_go_on, ask = threading.Event(), threading.Event(), LimitedProcess.ask

    def wait_and_ask(trial: LimitedProcess, request: dict[str, Any]) -> dict[str, Any]:
        is_tried.set()
        assert may_go_on.wait(30)
        return ask(trial, request)

    waiting: list[Any] = []

    def note(pool: ThreadPoolExecutor, action: Any, *given: Any) -> Any:
        if pool is not clients:
            waiting.append(action)
        return submit(pool, action, *given)

    submit = ThreadPoolExecutor.submit
    clients = ThreadPoolExecutor(3)
    monkeypatch.setattr(LimitedProcess, "ask", wait_and_ask)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", note)
    try:
        with clients:
            first = clients.submit(compiler.compile, json_grammar({"const": "first"}))
            assert is_tried.wait(30)
            second = clients.submit(compiler.compile, json_grammar({"const": "second"}))
            wait_until(lambda: len(waiting) == 2, "the second grammar waits")
            third = clients.submit(compiler.compile, json_grammar({"const": "third"}))
            with pytest.raises(Overloaded):
                second.result(30)
            may_go_on.set()
            assert first.result(30)
            assert third.result(30)
    finally:
        may_go_on.set()
        compiler.stop()


def test_a_failure_that_is_not_the_grammars_is_not_remembered(tiny_llava: Any, monkeypatch: Any) -> None:
    """A grammar that failed because no process could be started is compiled again at the next request."""
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings())
    grammar = json_grammar({"const": "first"})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(LimitedProcess, "ask", lambda *args: (_ for _ in ()).throw(OSError("no process")))
            with pytest.raises(OSError, match="no process"):
                compiler.compile(grammar)
        assert compiler.compile(grammar)
    finally:
        compiler.stop()


def test_a_vocabulary_that_could_not_be_read_once_is_read_again(tiny_llava: Any, monkeypatch: Any) -> None:
    """A worker that was short of memory at its first grammar compiles later ones."""
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings())
    try:
        with monkeypatch.context() as patch:
            patch.setattr(hf, "from_tokenizer", lambda *args, **options: (_ for _ in ()).throw(MemoryError))
            with pytest.raises(MemoryError):
                compiler.compile(json_grammar({"const": "first"}))
        assert compiler.compile(json_grammar({"const": "first"}))
    finally:
        compiler.stop()


def test_a_grammar_that_waits_too_long_for_the_vocabulary_may_be_sent_again(tiny_llava: Any, monkeypatch: Any) -> None:
    """A slow machine does not make the tokenizer one that cannot be combined with grammars."""
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings())
    may_go_on, read = threading.Event(), hf.from_tokenizer

    def wait_and_read(*args: Any, **options: Any) -> Any:
        assert may_go_on.wait(30)
        return read(*args, **options)

    monkeypatch.setattr(hf, "from_tokenizer", wait_and_read)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(grammar_module, "TOKENIZER_TIMEOUT_S", 0)
            with pytest.raises(Overloaded, match="try again later"):
                compiler.compile(json_grammar({"const": "first"}))
        may_go_on.set()
        assert compiler.compile(json_grammar({"const": "first"}))
    finally:
        may_go_on.set()
        compiler.stop()


def test_a_tokenizer_that_the_library_does_not_know_is_refused(tiny_llava: Any, monkeypatch: Any) -> None:
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings())
    reads: list[None] = []

    def refuse(*args: Any, **options: Any) -> Any:
        reads.append(None)
        raise Exception("a custom part cannot be written")  # the Rust library's own class

    monkeypatch.setattr(hf, "from_tokenizer", refuse)
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="cannot be combined with a grammar"):
                compiler.compile(json_grammar({"const": "first"}))
    finally:
        compiler.stop()
    assert len(reads) == 1


@pytest.mark.parametrize("limit", [{"max_states": 40}, {"max_cpu_s": 1e-9}])
def test_complex_answers_end_with_an_error(rows: Rows, tiny_llava: Any, limit: dict[str, Any]) -> None:
    """A grammar beyond its limits ends its own answer; the rows beside it go on."""
    compiler = GrammarCompiler(tiny_llava.tokenizer, tiny_llava.eos_token_ids, 480, GrammarSettings(**limit))
    try:
        hard = compiler.compile(GrammarText("regex", "(.*a){12}b.{9}c", "regex"))
    finally:
        compiler.stop()
    free = SamplingParams(max_new_tokens=40, do_sample=True, temperature=2.0, seed=1)
    bound = SamplingParams(max_new_tokens=200, do_sample=True, temperature=2.0, seed=1, grammar=hard)

    (tokens, last), (_, failed) = rows.run(free, bound)

    assert last.finish_reason is not None
    assert tokens == rows.run(free)[0][0]
    assert isinstance(failed.error, InvalidRequest)
    assert "too complex" in failed.error.message


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 200, **fields}


def test_chat_completion_follows_its_schema(client: Any) -> None:
    """The same seed gives the same answer; an answer that is cut says so."""
    first = client.call(chat(response_format=OPENAI_PERSON, **SAMPLED))
    second = client.call(chat(response_format=OPENAI_PERSON, **SAMPLED))
    cut = client.call(chat(response_format=OPENAI_PERSON, **{**SAMPLED, "max_tokens": 3}))

    assert first.status == 200, first.body
    [choice] = first.json["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["finish_reason"] == "stop"
    assert second.json["choices"] == first.json["choices"]
    assert cut.json["choices"][0]["finish_reason"] == "length"


def test_json_object_is_an_object(client: Any) -> None:
    answer = client.call(chat(response_format={"type": "json_object"}, **SAMPLED, max_tokens=1500))

    if answer.json["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer.json["choices"][0]["message"]["content"]), dict)
    assert answer.json["choices"][0]["message"]["content"].startswith("{")


BASES = {
    **{name: {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "abc"},
    "many": {"type": "array", "items": {"$ref": "#/$defs/a"}},
}
NESTED = {"properties": {"a": {"enum": [1]}, "b": {"$ref": "#/$defs/b"}}, "required": ["a", "b"]}
LEAF = {"type": "object", "properties": {"properties": {"enum": [2]}}, "required": ["properties"]}


def test_answers_have_declared_properties_only(rows: Rows, compiler: GrammarCompiler) -> None:
    """Objects are closed to undeclared properties by default, because a weak model would add them endlessly."""
    schema = {"type": "array", "minItems": 2, "items": {"type": "object", **NESTED}, "$defs": {"b": LEAF}}
    grammar = compiler.compile(read_schema(schema, "schema"))
    params = [
        SamplingParams(max_new_tokens=200, do_sample=True, temperature=2.0, seed=n, grammar=grammar) for n in (1, 2)
    ]

    for tokens, last in rows.run(*params):
        answer = rows.text(tokens)
        assert answer.replace(" ", "").startswith('[{"a":1,"b":{"properties":2}},{"a":1,"b":{"properties":2}}'), answer
        assert last.error is None
    assert "additionalProperties" not in LEAF


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"additionalProperties": {"type": "integer"}},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {}}}]},
        {"allOf": [{"properties": {"a": {}}}], "required": ["b"]},
        {"enum": [{"properties": {}}]},
        {"const": {"properties": {}}, "properties": 5, "items": [], "anyOf": {}},
        {"$ref": "#/$defs/a", "anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}], "$defs": BASES},
        {"$ref": "#/$defs/a", "allOf": [{"$ref": "#/$defs/b"}], "$defs": BASES},
        {"allOf": [{"$ref": "#/$defs/a"}], "anyOf": [{"$ref": "#/$defs/b"}], "$defs": BASES},
        {"$ref": "#/$defs/many", "items": {"$ref": "#/$defs/b"}, "$defs": BASES},
        {"patternProperties": {"^a": {"$ref": "#/$defs/a", "anyOf": [{"$ref": "#/$defs/b"}]}}, "$defs": BASES},
        {"properties": {"a": {}}, "enum": [{"a": 1, "b": 2}]},
        {"$ref": "#/$defs/a", "const": {"a": 1, "b": 2}, "$defs": BASES},
        {"properties": {f"{'x' * 100}{number}": {} for number in range(700)}},
    ],
)
def test_schemas_that_may_mean_other_properties_stay_as_they_are(schema: dict[str, Any]) -> None:
    """Schemas that may mean other properties, or that would take the parser too long to examine, stay unchanged."""
    assert json.loads(read_schema(schema, "schema").text) == schema


def test_closed_schemas_have_answers_that_fit_the_given_ones() -> None:
    """For random schemas that the library accepts, it also accepts the closed form, and answers are valid by both."""
    num_closed = 0
    for seed in range(1000):
        schema = RandomSchema(seed).make()
        text = read_schema(schema, "schema").text
        if json.loads(text) == schema or sample(json.dumps(schema), seed) is None:
            continue
        answer = sample(text, seed)
        assert answer is not None, schema
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
        num_closed += 1
    assert num_closed > 100


class RandomSchema:
    """Random schemas of objects with references and combinations, some of which cannot be satisfied."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> dict[str, Any]:
        return {**self._value(3), "$defs": {"x": self._object(2), "y": self._object(1)}}

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._random
        schema: dict[str, Any] = {"type": "object"}
        rules = {
            "properties": {name: self._value(depth - 1) for name in draw.sample("abc", draw.randint(0, 3))},
            "required": draw.sample("abc", draw.randint(0, 2)),
            "additionalProperties": draw.choice([True, False, {"type": "integer"}]),
            "patternProperties": {"^c": self._value(depth - 1)},
            "maxProperties": draw.randint(0, 3),
            "enum": [{"a": 1}, {"a": 1, "b": 2}],
        }
        for (name, rule), chance in zip(rules.items(), (0.9, 0.4, 0.1, 0.1, 0.1, 0.1), strict=True):
            if draw.random() < chance:
                schema[name] = rule
        return schema

    def _value(self, depth: int) -> dict[str, Any]:
        draw = self._random
        if depth <= 0:
            return dict(draw.choice([{"type": "integer", "maximum": 9}, {"type": "boolean"}, {"const": 1}]))
        schema: dict[str, Any] = {}
        several = {
            "$ref": f"#/$defs/{draw.choice('xy')}",
            "anyOf": [self._value(depth - 1) for _ in range(draw.randint(1, 2))],
            "allOf": [self._value(depth - 1) for _ in range(draw.randint(1, 2))],
        }
        if depth == 3:  # elsewhere a reference might refer to itself
            for name, rule in several.items():
                if draw.random() < 0.3:
                    schema[name] = rule
        if draw.random() < 0.3:
            return {**schema, "type": "array", "items": self._value(depth - 1), "maxItems": 2}
        return {**schema, **(self._object(depth) if draw.random() < 0.7 else {})}


def sample(schema: str, seed: int) -> str | None:
    """Return an answer by a schema, drawn byte by byte; None if the library refuses the schema."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
    draw, answer = random.Random(seed), bytearray()
    while not matcher.is_error() and not matcher.is_accepting():
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in b'{}[]":,0123456789abcdeflnrstu' if mask[byte // 8] >> byte % 8 & 1]
        closing = [byte for byte in b'}]"' if byte in allowed and len(answer) > 30]
        answer.append(draw.choice(closing or allowed))
        matcher.consume_token(answer[-1])
    return None if matcher.is_error() else answer.decode()


def test_chat_completion_follows_formats_of_tgi(client: Any) -> None:
    """Hugging Face's client sends every schema as the `value` of a json_object."""
    for format in (
        {"type": "json_object", "value": PERSON},
        {"type": "json", "value": PERSON},
        {"type": "json_object", "value": {"name": "person", "schema": PERSON}},
        {"type": "json_schema", "value": {"name": "person", "schema": PERSON}},
    ):
        answer = client.call(chat(response_format=format, **SAMPLED))

        assert answer.status == 200, answer.body
        jsonschema.validate(json.loads(answer.json["choices"][0]["message"]["content"]), PERSON)
    said = client.call(chat(response_format={"type": "regex", "value": "red|blue"}, **SAMPLED))
    assert said.json["choices"][0]["message"]["content"] in ("red", "blue")


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"type": "regex", "value": "[0-9]{3}-(red|blue)"}, "[0-9]{3}-(red|blue)"),
        ({"type": "lark", "value": 'start: "a" ("b" | "c")+ "d"'}, "a[bc]+d"),
        ({"type": "json", "value": {"enum": ["x", "y"]}}, '"[xy]"'),
        ({"type": "json_schema", "value": {"name": "n", "schema": {"type": "boolean"}}}, "true|false"),
    ],
)
def test_grammars_of_tgi_bodies(client: Any, grammar: dict[str, Any], pattern: str) -> None:
    """TGI's `grammar` binds raw prompts and a session's turns."""
    parameters = {"grammar": grammar, "max_new_tokens": 40, **SAMPLED}
    session = client.open()

    raw = client.call({"inputs": "Say it: ", "parameters": parameters})
    said = client.answer(session, "Say it", parameters=parameters)

    assert re.fullmatch(pattern, raw.json[0]["generated_text"])
    assert re.fullmatch(pattern, said)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    """Although JSON of that depth can still be read."""
    schema: dict[str, Any] = {}
    for _ in range(5_000):
        schema = {"items": schema}

    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        read_schema(schema, "response_format")

    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ("json", "response_format"),
        ({"type": "grammar"}, "response_format"),
        ({"type": "json_object", "schema": PERSON}, "response_format"),
        ({"type": "json_object", "value": 5}, "response_format.value"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\ud800"}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_wrong_formats_name_their_field(client: Any, format: Any, param: str) -> None:
    answer = client.call(chat(response_format=format))

    assert (answer.status, answer.error) == (400, "InvalidRequest")
    assert answer.json["error"]["param"] == param
