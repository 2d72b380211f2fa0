"""Affinity keys that OpenAI's clients and gateways send: one key's requests reach one instance, through any proxy."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import openai
import pytest

from tests.proxy.conftest import MakeStage, Stage
from tests.proxy.fake_instance import answering
from tests.proxy.test_access import TOKEN
from tests.proxy.test_openai import MESSAGES, behave, client
from torchmoor.config.credentials import Credentials
from torchmoor.config.routing import AffinitySettings, VariantSettings

BODY = b'{"id": "1", "object": "chat.completion", "created": 1, "model": "llava", "choices": []}'
NAMES = ("a", "b", "c", "d")
KEYS = [f"conversation-{number}" for number in range(12)]

CLIENTS: WeakKeyDictionary[Stage, openai.OpenAI] = WeakKeyDictionary()  # one for each proxy


def stages(make_stage: MakeStage, number: int = 1, **options: Any) -> list[Stage]:
    """Return proxies, each with four instances of the same names."""
    made = [make_stage(names=NAMES, **options) for _ in range(number)]
    for stage in made:
        for instance in stage.instances.values():
            instance.behave = answering(body=BODY)
    return made


def ask(stage: Stage, **options: Any) -> tuple[str, str]:
    """Ask with OpenAI's client; return the instance that answered and the reason."""
    if stage not in CLIENTS:
        CLIENTS[stage] = client(stage)
    answer = CLIENTS[stage].chat.completions.with_raw_response.create(model="llava", messages=MESSAGES, **options)
    return answer.headers["x-torchmoor-instance"], answer.headers["x-amzn-sagemaker-invoked-routing-reason"]


def keep_apart(stage: Stage, sends: Callable[[str], dict[str, Any]]) -> dict[str, str]:
    """Ask three times with each key; return each key's instance."""
    homes: dict[str, str] = {}
    for key in KEYS * 3:
        instance, reason = ask(stage, **sends(key))
        assert reason == "affinity"
        assert homes.setdefault(key, instance) == instance
    assert len(set(homes.values())) > 1
    return homes


@pytest.mark.parametrize(
    "sends",
    [
        lambda key: {"prompt_cache_key": key},
        lambda key: {"user": key, "safety_identifier": None},
        lambda key: {"extra_headers": {"x-session-affinity": key}, "user": "the same"},
        lambda key: {"extra_headers": {"session-id": key}},
    ],
)
def test_a_keys_requests_reach_one_instance_through_both_proxies(
    make_stage: MakeStage, sends: Callable[[str], dict[str, Any]]
) -> None:
    """A key in OpenAI's own fields or in gateways' header fields leads to one instance through both proxies."""
    first, second = stages(make_stage, 2)

    assert keep_apart(first, sends) == keep_apart(second, sends)


def test_the_first_key_counts(make_stage: MakeStage) -> None:
    """Header fields come before the body's fields, and those in the order of the documentation."""
    [stage] = stages(make_stage)
    homes = keep_apart(stage, lambda key: {"prompt_cache_key": key})

    for key, other in pairwise(KEYS):
        assert ask(stage, user=other, prompt_cache_key=key)[0] == homes[key]
        assert ask(stage, extra_headers={"x-session-id": key, "session-id": other}, user=other)[0] == homes[key]


def test_a_long_key_is_ignored_and_counted(make_stage: MakeStage) -> None:
    """The request is served by the strategy; the body arrives as it was sent."""
    [stage] = stages(make_stage)

    assert ask(stage, prompt_cache_key="k" * 256)[1] == "affinity"
    assert ask(stage, prompt_cache_key="k" * 257)[1] == "least-outstanding-requests"
    assert ask(stage, extra_headers={"x-session-id": "k" * 257}, user="bob")[1] == "least-outstanding-requests"

    [dispatcher] = stage.proxy.data.dispatchers.all()
    assert dispatcher.metrics.affinity_keys_ignored == 2
    assert ask(stage)[1] == ask(stage, user="")[1] == "least-outstanding-requests"


def test_keys_are_not_read_where_the_operator_says_so(make_stage: MakeStage) -> None:
    """With affinity.max_key_bytes 0, keys are ignored."""
    variant = VariantSettings(model="llava", affinity=AffinitySettings(max_key_bytes=0))
    [stage] = stages(make_stage, variants=(variant,))

    assert ask(stage, prompt_cache_key="a")[1] == "least-outstanding-requests"


def test_two_callers_with_one_key_have_nothing_in_common(make_stage: MakeStage) -> None:
    """A key is scoped to its caller."""
    tokens = {"alice": TOKEN, "bob": "token-of-bob-0123456789"}
    [stage] = stages(make_stage, credentials=Credentials(tokens=tokens))

    def homes(token: str) -> list[str]:
        fields = {"extra_headers": {"Authorization": f"Bearer {token}"}}
        return [ask(stage, prompt_cache_key=key, **fields)[0] for key in KEYS]

    assert homes(TOKEN) == homes(TOKEN) != homes(tokens["bob"])


def test_fields_elsewhere_in_the_body_are_no_keys(make_stage: MakeStage) -> None:
    """Only text fields of the request itself count as keys."""
    [stage] = stages(make_stage)
    behave(stage, answering(body=BODY))

    for options in (
        {"metadata": {"user": "bob"}},
        {"extra_body": {"user": {"name": "bob"}}},
        {"extra_body": {"x": ["user", {"prompt_cache_key": "a"}]}},
    ):
        assert ask(stage, **options)[1] == "least-outstanding-requests"
