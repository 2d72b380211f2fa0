"""Sessions of a model that does not run in packed steps: the same service over transformers' own forward pass."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.journal.directory import DirectoryJournal
from handlers.models.loader import load_model
from handlers.models.text import TextModel
from handlers.settings.journal import JournalSettings
from tests.unit.handlers.conftest import EndlessModel
from tests.unit.handlers.test_chat_service import Hold, settled
from tests.unit.handlers.tiny_checkpoints import PLAIN, save

SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, one_thread: None) -> TextModel:
    folder = tmp_path_factory.mktemp("gpt2")
    save(PLAIN["gpt2"](), folder, checkpoint)
    return load_model(folder, torch.device("cpu"), "float32")


def resend(model: TextModel, turns: list[tuple[str, str]], question: str) -> dict[str, Any]:
    """Return a body that has the whole conversation as a raw prompt."""
    said = [({"role": "user", "content": asked}, {"role": "assistant", "content": answer}) for asked, answer in turns]
    messages = [*(message for turn in said for message in turn), {"role": "user", "content": question}]
    prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {"inputs": prompt, "parameters": SAMPLED}


def test_a_follow_up_equals_the_conversation_sent_again(gpt2: TextModel, make_client: Any, tmp_path: Path) -> None:
    """Sampled turns equal those without a session and those of a worker that adopts it; a close frees the cache."""
    journal = DirectoryJournal(tmp_path, JournalSettings())
    client, other = (make_client(gpt2, instance=name, journal=journal) for name in ("gpt2-0", "gpt2-1"))
    sid = client.open()
    turns: list[tuple[str, str]] = []
    for question in ("hello", "and now?"):
        asked = client.ask(sid, question, parameters=SAMPLED).wait()
        resent = other.call(resend(gpt2, turns, question))
        assert asked.json["response_text"] == resent.json[0]["generated_text"]
        turns.append((question, asked.json["response_text"]))
    assert asked.headers["x-torchmoor-cache-tier"] == "kv"
    cache = client.session(sid).cache
    assert cache.num_bytes == client.pool.shape.num_bytes(cache.length)

    adopted = other.answer(sid, "and then?", parameters=SAMPLED)

    assert adopted == client.call(resend(gpt2, turns, "and then?")).json[0]["generated_text"]
    assert client.call({"type": "close_session", "session_id": sid}).status == 200
    assert cache.num_bytes == 0


def test_a_cancelled_answer_leaves_within_a_step(gpt2: TextModel, make_client: Any) -> None:
    """A disconnect ends an answer with the current step; a concurrent stream continues to its full length."""
    endless = EndlessModel(gpt2)  # any TextModel
    client = make_client(endless, engine={"max_new_tokens": 200})
    hold = Hold(endless)
    left, stays = client.send({"inputs": "hello"}), client.send({"inputs": "hello", "stream": True})
    hold.wait()

    left.reply.cancel()
    hold.release()

    assert left.wait().status == 499
    assert b'"finish_reason":"length"' in stays.wait().body
    status = settled(client)
    assert (status["turns"]["cancelled"], status["tokens"]["generated"] < 210) == (1, True)


def test_the_load_states_what_it_costs(
    checkpoint: Path, tmp_path: Path, make_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning and the worker's status state the type and the cost."""
    save(PLAIN["gpt2"](), tmp_path, checkpoint)

    with caplog.at_level(logging.WARNING, logger="handlers"):
        model = load_model(tmp_path, torch.device("cpu"), "float32")

    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("handlers.")]
    assert "gpt2" in warning
    assert "N times as long" in warning
    assert "AttributeError" not in warning
    assert settled(make_client(model))["capabilities"] == {
        "engine": "builtin",
        "max_context": 256,
        "can_see": False,
        "max_images": 8,
        "can_pin": True,
        "has_grammars": True,
        "has_tools": True,
        "is_packed": False,
        "refused": [],
    }
