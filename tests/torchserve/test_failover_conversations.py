"""An instance dies while it generates a response in the background for a conversation, on real TorchServe."""

from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest

from tests.torchserve.conftest import Three
from tests.torchserve.test_cancel import ENDLESS
from tests.torchserve.test_failover import kill_instance, recorded_turns
from tests.torchserve.test_faults import slowed_workers, wait_until_all_serve
from tests.waiting import wait_until
from torchmoor.wire.headers import INSTANCE
from torchmoor.wire.response_ids import read_response_id

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]


def test_a_conversation_gets_the_turn_once_when_the_instance_dies(three: Three) -> None:
    """After kill -9 of the instance during the answer, the conversation gets the turn once and can be continued."""
    turn: Any = {"model": "llava", "temperature": ENDLESS["temperature"], "max_output_tokens": 200}
    turn["extra_body"] = {"seed": ENDLESS["seed"]}
    with openai.OpenAI(base_url=f"{three.fleet.runtime}/v1", api_key="any", timeout=90, max_retries=0) as gpt:
        wait_until_all_serve(three.fleet)
        talk, other = gpt.conversations.create(), gpt.conversations.create()
        with slowed_workers(three.fleet):
            raw = gpt.responses.with_raw_response.create(**turn, input="one", conversation=talk.id, background=True)
            response_id = raw.parse().id
            wait_until(lambda: gpt.responses.retrieve(response_id).status == "in_progress", "it is being generated")
            kill_instance(three, raw.headers[INSTANCE])

        def is_complete() -> bool:
            with suppress(openai.OpenAIError, httpx2.HTTPError):
                return gpt.responses.retrieve(response_id).status == "incomplete"
            return False

        wait_until(is_complete, "the response ends")
        direct = gpt.responses.create(**turn, input="one", conversation=other.id)
        assert gpt.responses.retrieve(response_id).output_text == direct.output_text
        after, expected = (gpt.responses.create(**turn, input="two", conversation=each.id) for each in (talk, other))
        assert after.output_text == expected.output_text
        assert len(gpt.conversations.items.list(talk.id).data) == 4
    place = read_response_id(response_id)
    assert len(recorded_turns(three.journal, place.session_id)) == 2
