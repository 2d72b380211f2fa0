"""The ends of responses and of their connections: expiry, a proxy without the keys, a proxy that stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.torchserve.configured_proxy import serve_configured
from tests.torchserve.conftest import Fleet, run_fleet
from tests.torchserve.drawings import draw
from tests.torchserve.test_responses import COLOR, FIRST
from tests.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.torchserve]
TTL_S = 20


@pytest.fixture(scope="module")
def short_lived(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Run two instances with a journal, whose sessions expire soon."""
    folder = tmp_path_factory.mktemp("short")
    with run_fleet(
        *("--instances", "2"),
        run_dir=folder / "run",
        log=folder / "up.log",
        environment={"TORCHMOOR_HANDLER_SESSION_TTL_S": str(TTL_S)},
    ) as running:
        yield running


@contextmanager
def client_of(runtime: str, max_retries: int = 0) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{runtime}/v1", api_key="any", timeout=90, max_retries=max_retries) as gpt:
        yield gpt


@contextmanager
def serve_without_keys(fleet: Fleet, folder: Path, **settings: Any) -> Iterator[Fleet]:
    """Run a proxy in front of the fleet's instances that cannot verify their ids."""
    variants = [{"VariantName": "AllTraffic", "ModelName": "llava"}]
    content = {
        "Endpoints": [{"EndpointConfig": {"EndpointConfigName": "llava", "ProductionVariants": variants}}],
        "Instances": [{name: each[name] for name in ("name", "host", "port")} for each in fleet.instances()],
        **settings,
    }
    with serve_configured(fleet, folder, content) as served, client_of(served.runtime) as gpt:
        wait_until(lambda: gpt.models.list().data != [], "the endpoint is there")
        yield served


def test_a_proxy_without_the_key_routes_by_the_journal(fleet: Fleet, tmp_path: Path) -> None:
    """Without keys the proxy cannot find a response's instance; the instances verify the id, and refuse a forged one.

    An instance that lacks an answer of the other one refuses the next request with 409, which OpenAI's client repeats.
    """
    with client_of(fleet.runtime) as gpt, serve_without_keys(fleet, tmp_path) as served:
        first = gpt.responses.create(model="llava", input=FIRST)
        with client_of(served.runtime, max_retries=2) as other:
            for _ in range(4):
                assert other.responses.retrieve(first.id) == first
                following = other.responses.create(model="llava", input=COLOR, previous_response_id=first.id)
                assert "red" in following.output_text
            session, number = first.id.rsplit("_", 1)
            forged = f"{session[:-1]}{'a' if session[-1] != 'a' else 'b'}_{number}"
            with pytest.raises(openai.BadRequestError) as caught:
                other.responses.create(model="llava", input=COLOR, previous_response_id=forged)
    assert caught.value.code == "previous_response_not_found"


def test_what_has_expired_is_not_found(short_lived: Fleet) -> None:
    """An expired response, conversation, file or compaction gets OpenAI's error."""
    with client_of(short_lived.runtime) as gpt:
        first = gpt.responses.create(model="llava", input=FIRST)
        talk = gpt.conversations.create()
        compacted: Any = [item.to_dict() for item in gpt.responses.compact(model="llava", input=FIRST).output]
        file = gpt.files.create(file=draw("circle", "red"), purpose="vision")

        def is_gone() -> bool:
            try:
                gpt.files.retrieve(file.id)
            except openai.NotFoundError:
                return True
            return False

        wait_until(is_gone, "the last one has expired", deadline_s=DEADLINE_S + TTL_S)

        for use in (
            lambda: gpt.responses.retrieve(first.id),
            lambda: gpt.responses.delete(first.id),
            lambda: gpt.conversations.retrieve(talk.id),
            lambda: gpt.responses.create(model="llava", input=[*compacted, {"role": "user", "content": COLOR}]),
        ):
            with pytest.raises(openai.NotFoundError):
                use()
        with pytest.raises(openai.BadRequestError) as caught:
            gpt.responses.create(model="llava", input=COLOR, previous_response_id=first.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert gpt.files.list().data == []
