"""KV caches in the journal: a worker writes them for idle sessions, and the next worker reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handlers.engine.builtin.chat_engine import make_engine
from handlers.engine.builtin.kv_cache import BLOCK
from handlers.engine.builtin.kv_parts import PART, PART_BLOCKS, BlockParts
from handlers.engine.contract import KvPart
from handlers.journal.codec import HEAD_BYTES, KvCodec
from handlers.journal.event import DamagedRecord
from handlers.journal.url import open_journal
from handlers.models.llava import LlavaModel
from handlers.settings.engine import EngineSettings
from handlers.settings.journal import JournalSettings
from tests.torchserve.drawings import data_url
from tests.unit.handlers.journal_stores import new_id
from tests.waiting import wait_until

SHORT = {"parameters": {"max_new_tokens": 12}}
STORED = {"max_kv_bytes": 1 << 30, "kv_idle_s": 0.0}
QUESTION = "Please say as exactly as you can what you see in this picture, its shape, its color and where it is. " * 2
TIER = "x-torchmoor-cache-tier"
PREFILLED = "x-torchmoor-prefill-tokens"


@pytest.fixture
def make_worker(make_client: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that starts a worker on the shared journal."""

    def make(**settings: Any) -> Any:
        limits = {**STORED, **settings.pop("journal_settings", {})}
        journal = open_journal(JournalSettings(url=tmp_path.as_uri(), **limits), 3600)
        return make_client(journal=journal, journal_settings={"url": tmp_path.as_uri(), **limits}, **settings)

    return make


def count(client: Any, event: str) -> int:
    return int(client.service.status()["stored_kv"][event])


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("ts-seq-*/kv.*"))


def talk(client: Any, picture: Any, num_written: int, question: str = QUESTION) -> str:
    """Open a session, ask once, and wait until this number of parts is written. Return its id."""
    sid = str(client.open(data_url(picture)))
    assert client.ask(sid, question, **SHORT).wait().status == 200
    wait_until(lambda: count(client, "written") >= num_written, "the cache is written")
    return sid


def test_another_worker_continues_without_computing(make_worker: Any, red: Any, blue: Any) -> None:
    """Another worker computes only what follows the last full part, needs no image features, and answers the same."""
    first, second, alone = make_worker(), make_worker(), make_worker(journal_settings={"max_kv_bytes": 0})
    sid = talk(first, red, 2)
    same = talk(first, red, 4)
    expected = alone.ask(same, "And now?", **SHORT).wait()
    talk(second, blue, 2)  # the worker now knows how many tokens an image has

    answer = second.ask(sid, "And now?", **SHORT).wait()

    assert answer.json == expected.json
    assert (expected.headers[TIER], answer.headers[TIER]) == ("features", "stored-kv")
    num_restored = int(expected.headers[PREFILLED]) - int(answer.headers[PREFILLED])
    assert num_restored > PART
    assert num_restored % BLOCK == 0
    assert second.service.status()["tokens"]["restored"] == num_restored
    assert second.service.status()["images"]["encoded"] == 1


def test_an_evicted_cache_is_read_again(make_worker: Any, red: Any, tmp_path: Path) -> None:
    """A worker that lost a session's blocks to others reads them from the journal instead of computing them."""
    client = make_worker(session={"kv_bytes": 350_000})
    sid = talk(client, red, 2)
    while client.service.store.pool.num_evicted == 0:
        client.ask(client.open(), QUESTION, **SHORT).wait()

    answer = client.ask(sid, "And now?", **SHORT).wait()

    assert answer.headers[TIER] == "stored-kv"
    assert count(client, "read") >= 2


def test_what_was_written_is_not_written_again(make_worker: Any, red: Any, tmp_path: Path) -> None:
    """A further turn writes the last part, which has grown, and the parts behind it."""
    client = make_worker()
    sid = talk(client, red, 2)
    (first, *others) = parts(tmp_path)
    inode, num_before = first.stat().st_ino, len(others)

    client.ask(sid, QUESTION, **SHORT).wait()
    wait_until(lambda: len(parts(tmp_path)) > 1 + num_before, "the next part is written")

    assert first.stat().st_ino == inode


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: b"", lambda data: data * 2]
)
def test_a_damaged_part_is_ignored(make_worker: Any, red: Any, tmp_path: Path, spoil: Any) -> None:
    """A damaged part is counted and ignored; the answer is the same."""
    first, second, alone = make_worker(), make_worker(), make_worker(journal_settings={"max_kv_bytes": 0})
    sid = talk(first, red, 2)
    same = talk(first, red, 4)
    for path in parts(tmp_path):
        path.write_bytes(spoil(path.read_bytes()))

    answer = second.ask(sid, "And now?", **SHORT).wait()

    assert answer.json == alone.ask(same, "And now?", **SHORT).wait().json
    assert answer.headers[TIER] == "features"
    assert (count(second, "damaged"), count(second, "read")) == (1, 0)


def test_parts_of_another_session_or_place_are_ignored(make_worker: Any, red: Any, tmp_path: Path) -> None:
    """A part is signed for its session and number, so a copy under another name is ignored."""
    first, second = make_worker(), make_worker()
    sid = talk(first, red, 2)
    other = talk(first, red, 4, "Where? " + QUESTION)
    (tmp_path / sid / "kv.000000").write_bytes((tmp_path / other / "kv.000000").read_bytes())
    (tmp_path / other / "kv.000001").write_bytes((tmp_path / other / "kv.000000").read_bytes())

    for session_id in (sid, other):
        assert second.ask(session_id, "And now?", **SHORT).wait().status == 200

    assert (count(second, "damaged"), count(second, "read")) == (2, 1)


def test_a_full_budget_writes_nothing(make_worker: Any, red: Any, tmp_path: Path) -> None:
    """A full budget refuses the part and counts it; the session is computed again elsewhere."""
    first, second = (make_worker(journal_settings={"max_kv_bytes": 1000}) for _ in range(2))
    sid = first.open(data_url(red))
    first.ask(sid, QUESTION, **SHORT).wait()
    wait_until(lambda: count(first, "refused") == 1, "the refusal is counted")

    assert second.ask(sid, "And now?", **SHORT).wait().headers[TIER] == "features"
    assert parts(tmp_path) == []


def test_a_full_share_of_one_caller_leaves_room_for_others(make_worker: Any, red: Any, tmp_path: Path) -> None:
    """A caller's next part beyond its share is not written and counts as limited; another caller's is written."""
    client = make_worker(journal_settings={"max_caller_kv_bytes": 1000})

    def ask(**headers: str) -> str:
        opening = {"type": "start_session", "images": [data_url(red)]}
        sid = str(client.call(opening, headers).json["session_id"])
        assert client.ask(sid, QUESTION, headers=headers, **SHORT).wait().status == 200
        return sid

    ask(**{"x-torchmoor-endpoint": "llava", "x-torchmoor-principal": "alice"})
    wait_until(lambda: count(client, "limited") == 1, "the refusal is counted")
    assert parts(tmp_path) == []
    sid = ask()
    wait_until(lambda: count(client, "written") == 2, "the other cache is written")

    assert count(client, "limited") == 1
    assert {part.parent.name for part in parts(tmp_path)} == {sid}


def test_a_closed_session_leaves_no_part(make_worker: Any, red: Any, tmp_path: Path) -> None:
    client = make_worker()
    sid = talk(client, red, 2)

    assert client.call({"type": "close_session", "session_id": sid}).status == 200

    assert parts(tmp_path) == []


def parts_of(model: LlavaModel) -> BlockParts:
    return BlockParts(make_engine(model, 1 << 20, EngineSettings()))


def test_names_stand_for_model_tokens_and_images(tiny_llava: LlavaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names depend on the model, tokens and images, but not on image keys, which differ between workers."""
    block_parts = parts_of(tiny_llava)
    monkeypatch.setattr(tiny_llava, "fingerprint", "other")
    others = parts_of(tiny_llava)
    keys = [1] * BLOCK + [-7] * BLOCK + [2] * (BLOCK + 3)
    names = block_parts.name(keys, {-7: "red"}, "")

    assert len(set(names)) == len(names) == 3
    assert block_parts.name([-9 if key == -7 else key for key in keys], {-9: "red"}, "") == names
    assert block_parts.name(keys, {-7: "blue"}, "")[:1] == names[:1]
    assert not set(block_parts.name(keys, {-7: "blue"}, "")[1:]) & set(names)
    assert not set(block_parts.name(keys, {-7: "red"}, "adapter")) & set(names)
    assert not set(others.name(keys, {-7: "red"}, "")) & set(names)
    assert not set(block_parts.name([3, *keys], {-7: "red"}, "")) & set(names)
    assert block_parts.name(keys, {}, "") == names[:1]


def test_the_last_part_has_the_blocks_that_are_left(tiny_llava: LlavaModel) -> None:
    """The last part has the remaining whole blocks, and is found again if the prompt is at least as long."""
    block_parts = parts_of(tiny_llava)
    block_bytes = block_parts.max_bytes // PART_BLOCKS
    names = block_parts.name([1] * (PART + 2 * BLOCK + 5), {}, "")
    parts = block_parts.split(names)

    assert [(part.start, part.end) for part in parts] == [(0, PART), (PART, PART + 2 * BLOCK)]
    for number, part in enumerate(parts):
        assert block_parts.find(names, number, (part.end - part.start) // BLOCK * block_bytes) == part
    shorter = block_parts.find(names, 1, block_bytes)
    assert shorter == KvPart(names[PART_BLOCKS], PART, PART + BLOCK)
    for number, num_bytes in ((1, 3 * block_bytes), (0, 0), (0, 2 * block_parts.max_bytes), (0, 7)):
        assert block_parts.find(names, number, num_bytes) is None
    assert block_parts.split([]) == []


def test_the_codec_returns_what_it_was_given() -> None:
    """The codec restores what it encoded, with and without the fleet's keys."""
    sid, name = new_id(), bytes(range(32))
    for keys in ({}, {"k0": b"k" * 32}):
        codec = KvCodec(keys)
        data = codec.encode(sid, 3, name, b"content")

        found, content = codec.decode(data, sid, 3)
        assert (found, bytes(content)) == (name, b"content")
        for number, spoiled in ((4, data), (3, data[: HEAD_BYTES - 1]), (3, data[:-1]), (3, b"?" + data[1:])):
            with pytest.raises(DamagedRecord):
                codec.decode(spoiled, sid, number)


def test_an_image_of_the_journal_is_encoded_when_a_prompt_needs_it(
    make_worker: Any, red: Any, blue: Any, tmp_path: Path
) -> None:
    """Without the stored parts, an image whose encoding was deferred is encoded when a prompt needs it."""
    first, second, alone = make_worker(), make_worker(), make_worker(journal_settings={"max_kv_bytes": 0})
    sid, same = talk(first, red, 2), talk(first, red, 4)
    talk(second, blue, 2)
    for path in parts(tmp_path):
        path.unlink()

    answer = second.ask(sid, "And now?", **SHORT).wait()

    assert answer.json == alone.ask(same, "And now?", **SHORT).wait().json
    assert answer.headers[TIER] == "encoded"
    assert second.service.status()["images"]["encoded"] == 2
