"""Each sampling parameter is documented, and each engine uses it or refuses it."""

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from handlers.chat.parameters import OPENAI_NAMES, RULES, check_supported
from handlers.engine.builtin import sampler
from handlers.engine.contract import Capabilities, SamplingParams
from handlers.engine.vllm.parameters import REFUSED, VALUES, read_lengths, read_values
from handlers.errors import InvalidRequest
from torchmoor.wire.sampling_parameters import SAMPLING_NUMBERS

ROOT = Path(__file__).parents[3]
NAMES = sorted(each.name for each in fields(SamplingParams))
BUILTIN = Path(sampler.__file__).parent


def test_vllm_gets_what_it_does_not_refuse() -> None:
    """vLLM gets each parameter that is not refused; it lacks only typical_p."""
    assert set(REFUSED) == {"typical_p"}
    assert sorted({*VALUES, *REFUSED, "do_sample", "max_new_tokens", "min_tokens", "grammar"}) == NAMES


def test_values_for_vllm() -> None:
    """An answer that is not sampled has vLLM's values for greedy choice, whatever the request says."""
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7}
    rest: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": ((3, -1.0),),
        "ignore_eos": True,
    }
    expected = {**rest, "logit_bias": {3: -1.0}, "logprobs": 2}

    sampled = SamplingParams(max_new_tokens=1, do_sample=True, top_n_tokens=2, **given, **rest)
    greedy = SamplingParams(max_new_tokens=1, top_n_tokens=2, **given, **rest)

    assert read_values(sampled) == {**given, **expected}
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
    assert read_values(greedy) == {**off, **expected}


@pytest.mark.parametrize(("least", "num_given", "expected"), [(None, 0, 0), (5, 0, 5), (5, 3, 2), (5, 7, 0)])
def test_lengths_for_vllm_are_those_of_the_rest(least: int | None, num_given: int, expected: int) -> None:
    """vLLM counts the tokens of another worker as the prompt's, so both lengths are less by their number."""
    params = SamplingParams(max_new_tokens=9, min_tokens=least)

    assert read_lengths(params, num_given) == {"max_tokens": 9 - num_given, "min_tokens": expected}


@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_engine_reads_each_parameter(name: str) -> None:
    """The engine's code reads each parameter by its name; the contract's `is_plain` does not count."""
    nodes = (node for path in BUILTIN.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))

    assert any(isinstance(node, ast.Attribute) and node.attr == name for node in nodes)


@pytest.mark.parametrize("values", [{"typical_p": 0.5}, {"logit_bias": ((1, 2.0),)}])
def test_a_parameter_that_the_engine_lacks_is_refused_by_name(values: dict[str, Any]) -> None:
    [name] = values
    engine = Capabilities(
        engine="small",
        device="cpu",
        max_context=64,
        is_packed=True,
        can_resume=True,
        has_grammars=True,
        has_equal_images=True,
        image_side=None,
        refused=frozenset(values),
    )

    check_supported(SamplingParams(max_new_tokens=1), engine)
    with pytest.raises(InvalidRequest, match=f"the engine small does not support {name}"):
        check_supported(SamplingParams(max_new_tokens=1, **values), engine)


def test_each_field_of_the_contract_has_a_rule() -> None:
    assert set(NAMES) <= set(RULES)


def test_each_parameter_is_on_the_page_of_bodies() -> None:
    """The page of bodies documents each parameter, also under its OpenAI name."""
    page = (ROOT / "docs" / "runtime-api.md").read_text(encoding="utf-8")

    assert {name for name in {*RULES, *OPENAI_NAMES} if f"`{name}`" not in page} == set()


@pytest.mark.parametrize("name", SAMPLING_NUMBERS)
def test_a_penalty_is_not_plain(name: str) -> None:
    """A penalty changes greedy answers and counts another worker's tokens, so it is not plain; other parameters are."""
    given: Any = {name: 1}

    assert SamplingParams(max_new_tokens=1, **given).is_plain is not SAMPLING_NUMBERS[name].is_penalty
    assert not SamplingParams(max_new_tokens=1, do_sample=True, **given).is_plain
