"""Adapters of a chat worker: by request and by session, loaded on demand within their budget, and kept while used."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from handlers.engine.builtin.chat_engine import BuiltinEngine
from handlers.errors import ClientGone
from handlers.journal.directory import DirectoryJournal
from handlers.journal.url import open_journal
from handlers.models.llava import LlavaModel
from handlers.models.loader import load_model
from handlers.settings.journal import JournalSettings
from scripts.make_adapters import make_adapters
from tests.servers import BUCKET, S3Server
from tests.unit.handlers.conftest import Client, EndlessModel, Exchange, Reference, ServiceFactory, make_incoming
from tests.unit.handlers.merged import add_adapter
from tests.unit.handlers.test_chat_service import Hold
from tests.unit.handlers.test_continued_answers import Shown, pieces_of, rest_of
from tests.unit.handlers.test_continued_answers import begin as begin_stream
from tests.waiting import wait_until
from torchmoor.wire import headers as wire
from torchmoor.wire.background import run_resource

TARGET = "x-amzn-sagemaker-target-model"
ENDPOINT = "x-torchmoor-endpoint"
QUESTION = "What is it?"
LONG_QUESTION = "Please say as exactly as you can what it is, its shape, its color and where it is. " * 3
NAMES = ("adapter-000", "adapter-001", "adapter-002")
MAX_NEW_TOKENS = 8
PARAMETERS = {"max_new_tokens": MAX_NEW_TOKENS}


@pytest.fixture(scope="module")
def adapted_llava(checkpoint: Path, one_thread: None) -> LlavaModel:
    model = load_model(checkpoint, torch.device("cpu"), "float32", max_rank=16)
    assert isinstance(model, LlavaModel)
    return model


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"), len(NAMES), strength=1.0)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, folders: Sequence[Path], one_thread: None) -> dict[str, str]:
    """Return transformers' answer of each adapter, and of the base model under an empty name."""
    reference = Reference(checkpoint)
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    found = {"": reference(messages, [], MAX_NEW_TOKENS)}
    for folder in folders:
        add_adapter(reference.model, folder)
        found[folder.name] = reference(messages, [], MAX_NEW_TOKENS)
        add_adapter(reference.model, folder, sign=-1)
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture
def start(
    make_client: ServiceFactory,
    adapted_llava: LlavaModel,
    folders: Sequence[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Client]:
    """Start workers with the adapters."""
    cache = tmp_path_factory.mktemp("cache")

    def make(model: Any = adapted_llava, source: Path | str = folders[0].parent, **settings: Any) -> Client:
        limits = {"refresh_s": 0.05, "broken_s": 0.0, "cache_dir": str(cache)}
        max_bytes = settings.pop("max_bytes", 1 << 30)
        url = source if isinstance(source, str) else source.as_uri()
        adapters = {"source": url, "max_bytes": max_bytes}
        return make_client(model, adapters=adapters, many=limits, **settings)

    return make


def headers_for(adapter: str | None) -> dict[str, str]:
    return {ENDPOINT: "llava"} | ({} if adapter is None else {TARGET: adapter})


def complete(client: Client, adapter: str | None = None, **fields: Any) -> Exchange:
    messages = [{"role": "user", "content": QUESTION}]
    return client.send(
        {"messages": messages, "max_tokens": MAX_NEW_TOKENS, "temperature": 0, **fields}, headers_for(adapter)
    )


def text_of(exchange: Exchange) -> str:
    exchange.wait()
    assert exchange.status == 200, exchange.body
    return str(exchange.json["choices"][0]["message"]["content"])


def open_session(client: Client, adapter: str | None = None) -> str:
    answer = client.call({"requestType": "NEW_SESSION"}, headers_for(adapter))
    assert answer.status == 200, answer.body
    return str(answer.json["session_id"])


def ask(client: Client, session_id: str, adapter: str | None = None) -> str:
    answer = begin(client, session_id, adapter).wait()
    assert answer.status == 200, answer.body
    return str(answer.json["response_text"])


def begin(client: Client, session_id: str, adapter: str | None = None) -> Exchange:
    return client.ask(session_id, QUESTION, headers=headers_for(adapter), parameters=PARAMETERS)


def used_bytes(client: Client) -> int:
    status: Any = client.service.status()
    return int(status["budgets"]["device"]["used"])


def num_leases(client: Client) -> int:
    status: Any = client.service.status()
    return sum(model.get("leases", 0) for model in status["models"])


def in_memory(client: Client) -> set[str]:
    status: Any = client.service.status()
    return {model["name"] for model in status["models"] if model["tier"] == "device"}


def progress_of(client: Client, name: str) -> str:
    status: Any = client.service.status()
    return next((str(model["progress"]) for model in status["models"] if model["name"] == name), "")


def test_requests_name_their_adapters_and_run_beside_each_other(
    start: Callable[..., Client], expected: dict[str, str]
) -> None:
    client = start()
    asked = {name: complete(client, name) for name in NAMES}
    asked[""] = complete(client)
    assert {name: text_of(exchange) for name, exchange in asked.items()} == expected
    again = complete(client, NAMES[0])
    text_of(again)
    assert again.headers["x-torchmoor-model-cache"] == "hit"
    assert asked[NAMES[0]].headers["x-torchmoor-model-cache"] in ("cold", "disk")
    assert "x-torchmoor-model-cache" not in asked[""].headers


def test_all_choices_of_a_request_are_its_adapters(start: Callable[..., Client], expected: dict[str, str]) -> None:
    answer = complete(start(), NAMES[0], n=3).wait()
    texts = [choice["message"]["content"] for choice in answer.json["choices"]]
    assert texts == [expected[NAMES[0]]] * 3


def test_a_session_keeps_the_adapter_that_opened_it_unless_a_request_names_another(
    start: Callable[..., Client], expected: dict[str, str]
) -> None:
    client = start()
    assert ask(client, open_session(client, NAMES[1])) == expected[NAMES[1]]
    assert ask(client, open_session(client, NAMES[1]), NAMES[2]) == expected[NAMES[2]]
    assert ask(client, open_session(client, NAMES[1]), "llava") == expected[""]
    assert ask(client, open_session(client)) == expected[""]
    assert ask(client, open_session(client), NAMES[0]) == expected[NAMES[0]]


@pytest.mark.parametrize(
    "name", ["adapter-9", "../adapters/adapter-000", "a/../adapter-000", "/etc", ".hidden", "a\\b"]
)
def test_an_unknown_name_is_refused_and_opens_nothing(start: Callable[..., Client], name: str) -> None:
    client = start()
    opened = client.call({"requestType": "NEW_SESSION"}, headers_for(name))
    assert (opened.status, opened.error) == (404, "ModelUnknown")
    asked = complete(client, name).wait()
    assert (asked.status, asked.error) == (404, "ModelUnknown")
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    both = client.call(body, {**headers_for(name), "x-amzn-sagemaker-session-id": "NEW_SESSION"})
    assert (both.status, both.error) == (404, "ModelUnknown")
    assert len(client.service.store) == 0


def create(client: Client, adapter: str, **fields: Any) -> Exchange:
    body = {"model": adapter, "input": QUESTION, "max_output_tokens": MAX_NEW_TOKENS, **fields}
    return client.call(body, {**headers_for(adapter), wire.RESOURCE: "POST responses"})


def test_responses_in_the_background_are_their_adapters(start: Callable[..., Client], expected: dict[str, str]) -> None:
    """Responses in the background use their adapter.

    This holds in their own session, and in a conversation whose other turns use the base model.
    """
    client = start()

    def text_of_response(adapter: str, **fields: Any) -> str:
        response_id = create(client, adapter, background=True, **fields).json["id"]
        assert client.call({}, {ENDPOINT: "llava", wire.RESOURCE: run_resource(response_id)}).status == 200
        found = client.call({}, {ENDPOINT: "llava", wire.RESOURCE: f"GET responses/{response_id}"}).json
        return str(found["output"][0]["content"][0]["text"])

    for adapter in ("llava", NAMES[0]):
        talk = client.call({}, {ENDPOINT: "llava", wire.RESOURCE: "POST conversations"}).json["id"]
        for fields in ({}, {"conversation": talk}):
            assert text_of_response(adapter, **fields) == expected[adapter if adapter in NAMES else ""]


def test_a_response_in_the_background_of_an_unknown_adapter_is_refused(start: Callable[..., Client]) -> None:
    """A background response with an unknown adapter is refused at once, like one that its client waits for."""
    client = start()

    refused = [create(client, "nope", background=is_background) for is_background in (True, False)]

    assert [(each.status, each.error) for each in refused] == [(404, "ModelUnknown")] * 2
    assert refused[0].body == refused[1].body
    assert b"'nope'" in refused[0].body
    assert client.service.store.session_ids() == []


def test_a_broken_adapter_is_refused_with_the_reason(
    start: Callable[..., Client], folders: Sequence[Path], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "broken")
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    client = start(source=tmp_path)
    answer = complete(client, "broken").wait()
    assert (answer.status, answer.error) == (424, "ModelBroken")
    assert "adapter_model.safetensors" in answer.json["error"]["message"]
    assert used_bytes(client) == 0


def test_adapters_leave_by_last_use_within_their_budget_and_their_bytes_return(
    start: Callable[..., Client], expected: dict[str, str]
) -> None:
    client = start()
    text_of(complete(client, NAMES[0]))
    max_bytes = int(2.5 * used_bytes(client))  # while it loads, an adapter counts as its file, which is larger
    small = start(max_bytes=max_bytes)
    for name in (*NAMES[:2], NAMES[0], NAMES[2]):
        assert text_of(complete(small, name)) == expected[name]
        assert used_bytes(small) <= max_bytes
    assert in_memory(small) == {NAMES[0], NAMES[2]}
    for name in (NAMES[0], NAMES[2]):
        unload(small, name)
    assert used_bytes(small) == 0


def unload(client: Client, name: str) -> None:
    assert client.adapters is not None
    exchange = Exchange()
    body = json.dumps({"action": "unload", "model": name}).encode()
    operation = make_incoming({"x-torchmoor-operation": "models"}, body)
    client.adapters.before(client.service.start)(operation, exchange.reply)
    assert exchange.wait().status == 200, exchange.body


def test_an_adapter_stays_while_an_answer_uses_it_and_others_wait_for_room(
    start: Callable[..., Client], adapted_llava: LlavaModel
) -> None:
    client = start()
    text_of(complete(client, NAMES[0]))
    model = EndlessModel(adapted_llava)
    small = start(model, max_bytes=int(1.5 * used_bytes(client)))
    hold = Hold(model)
    endless = complete(small, NAMES[0], max_tokens=400, stream=True)
    hold.wait()
    waiting = complete(small, NAMES[1])
    wait_until(lambda: progress_of(small, NAMES[1]).startswith("room"), "the other adapter waits for room")
    assert in_memory(small) == {NAMES[0]}
    endless.reply.cancel(ClientGone("the client has gone"))
    hold.release()
    assert waiting.wait().status == 200, waiting.body
    assert in_memory(small) == {NAMES[1]}


def test_a_client_that_leaves_while_its_adapter_loads_leaves_nothing(
    start: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, may_load = threading.Event(), threading.Event()
    load = BuiltinEngine.load_adapter

    def load_slowly(engine: BuiltinEngine, folder: Path) -> Any:
        loading.set()
        assert may_load.wait(30)
        return load(engine, folder)

    monkeypatch.setattr(BuiltinEngine, "load_adapter", load_slowly)
    client = start()
    gone, stays = complete(client, NAMES[0]), complete(client, NAMES[0])
    assert loading.wait(30)
    gone.reply.cancel(ClientGone("the client has gone"))
    wait_until(
        lambda: client.service.counters.get("turns_cancelled") == 1, "the answer ends before its adapter is there"
    )
    may_load.set()
    assert stays.wait().status == 200
    wait_until(lambda: num_leases(client) == 0, "all leases end")


def test_another_worker_continues_a_session_with_its_adapter(
    start: Callable[..., Client], expected: dict[str, str], tmp_path: Path
) -> None:
    journal = DirectoryJournal(tmp_path / "journal", JournalSettings())
    first, second = (start(instance=name, journal=journal) for name in ("llava-0", "llava-1"))
    session_id = open_session(first, NAMES[1])
    assert ask(second, session_id) == expected[NAMES[1]]
    assert in_memory(second) == {NAMES[1]}


def test_a_changed_folder_answers_from_the_next_request_on(
    start: Callable[..., Client], folders: Sequence[Path], expected: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folders[0], tmp_path / "mine")
    client = start(source=tmp_path)
    session_id = open_session(client, "mine")
    assert ask(client, session_id) == expected[NAMES[0]]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(folders[1] / name, tmp_path / "new")
        (tmp_path / "new").rename(tmp_path / "mine" / name)
    wait_until(lambda: text_of(complete(client, "mine")) == expected[NAMES[1]], "the new version answers")
    assert ask(client, open_session(client, "mine")) == expected[NAMES[1]]
    answer = begin(client, session_id).wait()
    assert (answer.status, answer.headers["x-torchmoor-cache-tier"]) == (200, "none")


def test_a_stored_kv_cache_is_read_under_its_adapter_only(start: Callable[..., Client], tmp_path: Path) -> None:
    stored = {"url": tmp_path.as_uri(), "max_kv_bytes": 1 << 30, "kv_idle_s": 0.0}

    def make() -> Client:
        journal = open_journal(JournalSettings(**stored), 3600)
        return start(journal=journal, journal_settings=stored)

    def talk(client: Client, session_id: str, question: str, adapter: str | None = None) -> Any:
        headers = headers_for(adapter)
        answer = client.ask(session_id, question, headers=headers, parameters=PARAMETERS).wait()
        assert answer.status == 200, answer.body
        return answer.json["response_text"]

    first, same, other, alone = make(), make(), make(), start()
    session_ids = [open_session(first, NAMES[0]) for _ in range(2)]
    for session_id in session_ids:
        talk(first, session_id, LONG_QUESTION)
    wait_until(lambda: first.service.counters.get("stored_kv_written") >= 4, "both caches are written")
    session_id = open_session(alone, NAMES[0])
    talk(alone, session_id, LONG_QUESTION)
    assert talk(same, session_ids[0], QUESTION) == talk(alone, session_id, QUESTION)
    assert same.service.counters.get("tokens_restored") > 0
    talk(other, session_ids[1], QUESTION, NAMES[1])
    assert other.service.counters.get("tokens_restored") == 0
    assert other.service.counters.get("stored_kv_stale") > 0


def test_a_stream_that_is_cut_goes_on_elsewhere_by_its_adapter_only(
    start: Callable[..., Client], adapted_llava: LlavaModel
) -> None:
    one, other = (start(EndlessModel(adapted_llava), instance=name) for name in ("llava-0", "llava-1"))
    body = {"inputs": QUESTION, "stream": True, "parameters": {"max_new_tokens": 20}}
    begun = begin_stream(one, make_incoming(headers_for(NAMES[0]), body))
    whole = pieces_of(begun)
    rest = rest_of(other, body, headers_for(NAMES[0]), begun.headers[wire.CONTINUABLE], whole[:4])
    assert Shown(whole[:4], pieces_of(rest)) == Shown(whole)
    refused = rest_of(other, body, headers_for(NAMES[1]), begun.headers[wire.CONTINUABLE], whole[:4]).wait()
    assert refused.error == "TurnConflict"


@pytest.mark.s3
def test_adapters_come_from_s3(
    start: Callable[..., Client],
    folders: Sequence[Path],
    expected: dict[str, str],
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3_server.use_in(monkeypatch)
    client = s3_server.client()
    for file in folders[2].iterdir():
        client.upload_file(str(file), BUCKET, f"lora/team/legal/{file.name}")
    worker = start(source=f"s3://{BUCKET}/lora")
    assert text_of(complete(worker, "team/legal")) == expected[NAMES[2]]
    assert complete(worker, "team/none").wait().error == "ModelUnknown"


def test_a_worker_without_adapters_refuses_a_session_that_has_one(
    start: Callable[..., Client], make_client: ServiceFactory, tmp_path: Path
) -> None:
    journal = DirectoryJournal(tmp_path / "journal", JournalSettings())
    session_id = open_session(start(journal=journal), NAMES[0])
    answer = begin(make_client(instance="other", journal=journal), session_id).wait()
    assert (answer.status, answer.error) == (404, "ModelUnknown")
