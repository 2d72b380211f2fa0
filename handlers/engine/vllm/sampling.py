"""Translation of generation parameters and outputs between chat and vLLM."""

from collections.abc import Collection, Iterator
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from handlers.engine.contract import FinishReason, GrammarText, SamplingParams, TokenEvent
from handlers.engine.vllm.parameters import read_lengths, read_values
from handlers.errors import InternalError


def to_vllm(params: SamplingParams, num_given: int, eos_token_ids: Collection[int]) -> VllmParams:
    """Return vLLM's parameters for an answer whose first `num_given` tokens exist already."""
    return VllmParams(
        stop_token_ids=[] if params.ignore_eos else sorted(eos_token_ids),
        structured_outputs=_grammar(params.grammar),
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        **read_lengths(params, num_given),
        **read_values(params),
    )


def _grammar(source: GrammarText | None) -> StructuredOutputsParams | None:
    if source is None:
        return None
    if source.kind == "regex":
        return StructuredOutputsParams(regex=source.text)
    if source.kind == "lark":
        return StructuredOutputsParams(grammar=source.text)
    return StructuredOutputsParams(json=source.text)


def read_output(output: RequestOutput, params: SamplingParams, eos_token_ids: Collection[int]) -> Iterator[TokenEvent]:
    """Yield the tokens that an output of vLLM adds to its answer, the last one with the reason of the end."""
    [completion] = output.outputs
    reason = _reason(completion.finish_reason)
    tokens = list(completion.token_ids)
    if reason is not None and not tokens:
        yield TokenEvent(min(eos_token_ids), finish_reason=reason, num_cached=output.num_cached_tokens or 0)
    for number, token in enumerate(tokens):
        logprob = 0.0
        top: tuple[tuple[int, float], ...] = ()
        if completion.logprobs is not None:
            found: dict[int, Any] = completion.logprobs[number]  # type: ignore[assignment]
            logprob = found[token].logprob
            if params.top_n_tokens:
                likeliest = sorted(found.items(), key=lambda item: item[1].rank)[: params.top_n_tokens]
                top = tuple((id, each.logprob) for id, each in likeliest)
        is_last = number == len(tokens) - 1
        yield TokenEvent(token, logprob, reason if is_last else None, top=top, num_cached=output.num_cached_tokens or 0)


def _reason(text: str | None) -> FinishReason | None:
    if text is None:
        return None
    if text == "stop":
        return FinishReason.EOS
    if text == "length":
        return FinishReason.LENGTH
    raise InternalError(f"vLLM ended the answer: {text}")
