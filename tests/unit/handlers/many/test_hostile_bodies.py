"""Embeddings and rerank with damaged bodies: each gets an answer, or a 400 that says what is wrong; never a 500."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import transformers as hf

from tests.unit.handlers.many import tiny
from tests.unit.handlers.many.test_service import Worker, whole

EMBEDDINGS = {"input": "a cat", "model": "m", "encoding_format": "float", "dimensions": 4, "user": "u"}
RERANK = {"query": "a", "documents": ["b", "c"], "model": "m", "top_n": 1, "return_documents": True, "user": "u"}
# Each path, with a body that is valid there.
ASKED = {"embed": EMBEDDINGS, "embed/rerank": RERANK, "rank": RERANK}
NAN, INF, HUGE = float("nan"), float("inf"), 10**400
NUMBERS = (None, True, False, 0, -1, 1, 1.5, NAN, INF, -INF, HUGE, -HUGE, 2**63, 1e308)
TEXTS = ("", " ", "a", "\ud800", "a\udfff", "\x00", "\u202e" * 50, "a" * 500_001, "a " * 1_000_001)
LISTS = ([], [[]], [1, 2], [[1, 2], [3]], ["a", 1], ["a", None], ["a", ["b"]], ["a", "\ud800"], [True], [1.5], [NAN])
OBJECTS = ({}, {"text": "a"}, {"text": None}, {"text": {"text": "a"}}, [{"text": "a"}], ["a", {"text": 1}])
LONG = (["a"] * 256, ["a"] * 257, ["a" * 500_001])
ODD: tuple[Any, ...] = (*NUMBERS, *TEXTS, *LISTS, *OBJECTS, *LONG)
DEPTHS = (100, 900, 990, 200_000)
RAW = (
    b"",
    b"{",
    b"NaN",
    b"\xff\xfe{}",
    b'{"input":"\xed\xa0\x80"}',
    '{"input":"a"}'.encode("utf-16"),
    b'{"input":"a","dimensions":1e400}',
    b'{"input":"a","dimensions":' + b"9" * 5000 + b"}",
    b'{"query":"a","documents":["b"],"top_n":' + b"9" * 4000 + b"}",
    b'{"query":"a","documents":[' + b"{}," * 300_000 + b"{}]}",
    b'{"query":"' + b"a" * 400_000 + b'","documents":[' + b'"b",' * 200 + b'"b"]}',
    b'{"input":"a",' + b",".join(b'"k%d":1' % number for number in range(100_000)) + b"}",
    b'{"input":' + b"[" * 4_000_001 + b"}",
)


@pytest.fixture(scope="module")
def hostile_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Run a worker with a model of embeddings and a cross encoder; afterwards no lease is left."""
    folder = tmp_path_factory.mktemp("hostile")
    embed = tiny.save_checkpoint(folder / "models" / "embed", "BertModel")
    (embed / "modules.json").write_text(json.dumps([{"type": "models.Transformer", "path": ""}]))
    with pytest.MonkeyPatch.context() as patch:
        one_label = hf.BertConfig(**tiny.CONFIGS["BertModel"]().to_diff_dict() | {"num_labels": 1})
        patch.setitem(tiny.CONFIGS, "BertForSequenceClassification", lambda: one_label)
        tiny.save_checkpoint(folder / "models" / "rank", "BertForSequenceClassification")
    worker = Worker(folder)
    yield worker
    worker.registry.check_integrity()
    worker.service.stop()


def send(worker: Worker, asked: str, body: bytes) -> int:
    """Send a body and return the status; check that the answer is valid JSON, and short if it is an error."""
    answer = whole(worker.ask(asked.partition("/")[0], body))
    content = json.loads(answer.body, parse_constant=pytest.fail)
    if answer.status != 200:
        assert answer.status == 400, content
        assert content["error"]["message"]
        assert len(answer.body) < 1000
    return answer.status


@pytest.mark.parametrize("asked", ASKED)
def test_a_body_with_one_odd_value_is_answered_or_refused(hostile_worker: Worker, asked: str) -> None:
    """An odd value in any field, or in an unknown one, gets an answer or a 400."""
    whole_body = ASKED[asked]
    assert send(hostile_worker, asked, json.dumps(whole_body).encode()) == 200
    statuses = {
        send(hostile_worker, asked, json.dumps({**whole_body, name: value}).encode())
        for name, value in product((*whole_body, "\ud800", "parameters"), ODD)
    }
    assert statuses == {200, 400}


@pytest.mark.parametrize("asked", ASKED)
def test_a_body_with_a_deep_value_is_answered_or_refused(hostile_worker: Worker, asked: str) -> None:
    """A deeply nested value in any field gets an answer or a 400.

    A field that is not read may be as deep as the parser allows.
    """
    for name, depth in product(ASKED[asked], DEPTHS):
        rest = json.dumps({key: value for key, value in ASKED[asked].items() if key != name})[:-1]
        lists, objects = "[" * depth + "]" * depth, '{"text":' * depth + "1" + "}" * depth
        for deep in (lists, objects):
            status = send(hostile_worker, asked, f'{rest}, "{name}": {deep}}}'.encode())
            assert name == "user" or status == 400


@pytest.mark.parametrize(("asked", "num_answered"), [("embed", 3), ("rank", 1)])
def test_bytes_that_are_not_a_body_are_answered_or_refused(
    hostile_worker: Worker, asked: str, num_answered: int
) -> None:
    """Bytes that are not a JSON object get a 400.

    UTF-16 JSON, and a top_n above the number of documents, are accepted.
    """
    statuses = [send(hostile_worker, asked, body) for body in RAW]
    assert statuses.count(200) == num_answered
