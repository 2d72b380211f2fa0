"""torch.compile for what lies between the attention calls: norms and feed-forward blocks of the decoder's layers.

Attention stays as it is: it walks over sequences of any number and length, which would be compiled anew at every step.
Everything is compiled while the model is loaded, for one token and for any larger number, so that no request waits
for a compiler.
"""

from typing import Any

import torch

from handlers.errors import ConfigError

_NUM_TOKENS = (1, 2, 3)  # 1 is a case of its own; of the others the second one shows that they are one


def compile_layers(decoder: Any) -> None:
    """Replace the forward methods by compiled ones. Raises ConfigError if there is no working compiler."""
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
    except Exception as exc:  # dynamo's, inductor's and the compilers' own
        reason = str(exc).strip().partition("\n")[0]
        raise ConfigError(f"handler.model.compile is layers, but torch.compile fails: {reason}") from exc


def _is_attention(part: Any) -> bool:
    return "attention" in type(part).__name__.lower()
