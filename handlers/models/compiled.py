"""torch.compile of the decoder's norms and feed-forward blocks, between the attention calls.

Attention is not compiled: its sequences vary in number and length, which would cause a compilation at every step.
Everything is compiled during the load, for one token and for any larger number, so that no request waits for it.
"""

from typing import Any

import torch

from handlers.errors import SettingsError

_NUM_TOKENS = (1, 2, 3)  # 1 is compiled separately; the third call checks that 2 covers larger numbers


def compile_layers(decoder: Any) -> None:
    """Replace the forward methods by compiled ones. Raises SettingsError without a working compiler."""
    parts = [part for layer in decoder.layers for part in layer.children() if not _is_attention(part)]
    parameter = next(decoder.parameters())
    try:
        with torch.inference_mode():
            for part in parts:
                part.compile(dynamic=True)
            for num_tokens in _NUM_TOKENS:
                hidden = torch.zeros(
                    1, num_tokens, decoder.config.hidden_size, dtype=parameter.dtype, device=parameter.device
                )
                for part in parts:
                    part(hidden)
    except Exception as exc:  # dynamo, inductor and the compilers have errors of their own
        reason = str(exc).strip().partition("\n")[0]
        raise SettingsError(f"handler.model.compile is layers, but torch.compile fails: {reason}") from exc


def _is_attention(part: Any) -> bool:
    return "attention" in type(part).__name__.lower()
