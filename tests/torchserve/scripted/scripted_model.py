"""A model that begins a call if it has tools, or writes one answer, with reasoning if it is asked for it.

Where the script ends, or a grammar forbids it, the model ends as soon as it may.
"""

from typing import Any

import torch
from torch import Tensor

ANSWER = "The circle is red."
REASONED = f"<think>\nTen times 37, and half of that.\n</think>\n\n{ANSWER}"
CALL = "<tool_call>"
ASKED, OFFERED = "reasoning", "</tools>"  # in the question: the model reasons; in the prompt: it has tools
# Logits: the script's token, the ends of the answer, of a JSON string, and of a JSON object.
NEXT, END, QUOTE, BRACE = 4.0, 3.0, 2.0, 1.0


class ScriptedModel:
    """The demo model, but its logits follow the script. It keeps tokens where the model keeps keys.

    So a conversation's prompt is read from the engine's KV cache, and an answer is wrong if that is.
    """

    def __init__(self, model: Any) -> None:
        self.real = model
        tokenizer = model.tokenizer
        ids: list[list[int]] = tokenizer([ANSWER, REASONED, CALL], add_special_tokens=False)["input_ids"]
        self._answer, self._reasoned, self._call = ids
        self._assistant: int = tokenizer.convert_tokens_to_ids("<|assistant|>")
        self._quote, self._brace = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in '"}')
        self._ids = torch.empty(0, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def embed(self, ids: Tensor) -> Tensor:
        self._ids = ids
        embedded: Tensor = self.real.embed(ids)
        return embedded

    def forward(self, embeds: Tensor, positions: Tensor, batch: Any, last: Tensor) -> Tensor:
        """Store the step's tokens and return the logits of each share's next one."""
        kept = batch.storage[0, 0, 0, :, 0]
        kept[batch.slots] = self._ids.to(kept.dtype)
        assert batch.rows is None
        return torch.stack([self._logits(_context(share.context, kept)) for share in batch.shares])

    def _logits(self, context: list[int]) -> Tensor:
        logits = torch.zeros(self.real.vocabulary)
        logits[self._quote], logits[self._brace] = QUOTE, BRACE
        logits[list(self.real.eos_token_ids)] = END
        if self._assistant in context:
            start = len(context) - context[::-1].index(self._assistant)
            before, _, question = self.real.tokenizer.decode(context[:start]).rpartition("<|user|>")
            script, said = self._call if OFFERED in before else self._answer, context[start:]
            if ASKED in question:
                script = self._reasoned
            if said == script[: len(said)] and len(said) < len(script):
                logits[script[len(said)]] = NEXT
        return logits


def _context(given: Any, kept: Tensor) -> list[int]:
    """Return a share's tokens: given as views of the storage, or as slots of it."""
    found = kept[given] if isinstance(given, Tensor) else given[0][0, 0, :, 0]
    tokens: list[int] = found.long().tolist()
    return tokens
