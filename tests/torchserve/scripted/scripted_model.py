"""A model that follows scripts: a call if it has tools, an answer, with reasoning if the question requests it.

At the script's end, or where a grammar forbids the script, the model ends as soon as it may.
"""

from typing import Any

import torch
from torch import Tensor

ANSWER = "The circle is red."
REASONED = f"<think>\nTen times 37, and half of that.\n</think>\n\n{ANSWER}"
NO_THOUGHT = "<think>\n\n</think>\n\n"  # the end of a prompt whose answer may not reason
CALL = "<tool_call>"
JOKE = '{"setup":"Why do cats purr?","punchline":"Purrhaps they are happy."}'
# Calls or answers to questions with these words: a function's name and its arguments. LangChain's suite uses them.
CALLS = {
    "magic_function(3)": ("magic_function", '{"input":3}'),
    "magic_function_no_args()": ("magic_function_no_args", "{}"),
    "Pirate greeting": ("greeting_generator", '{"answer_style":"Pirate"}'),
    "San Francisco": ("get_weather", '{"location":"San Francisco"}'),
    "3 + 4": ("my_adder_tool", '{"a":3,"b":4}'),
    "\u4f60\u597d": ("unicode_customer", '{"customer_name":"\u4f60\u597d","description":"a company"}'),
    "\u3053\u3093": ("unicode_customer", '{"customer_name":"\u3053\u3093","description":"a company"}'),
    "joke about cats": ("Joke", JOKE),
}
ANSWERS = {"joke about cats": JOKE}
ASKED, OFFERED = "reasoning", "</tools>"  # in the question: the model reasons; in the prompt: it has tools
RESULT = "<tool_response>"  # in the question: a tool's result, which the model answers
# Logits: the script's token, the ends of the answer, of a JSON string, and of a JSON object.
NEXT, END, QUOTE, BRACE = 4.0, 3.0, 2.0, 1.0


class ScriptedModel:
    """The demo model with logits that follow the script. It stores tokens in place of keys.

    So a conversation's prompt is read from the engine's KV cache, and a wrong cache gives a wrong answer.
    """

    def __init__(self, model: Any) -> None:
        self.real = model
        tokenizer = model.tokenizer

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        self._answer, self._reasoned, self._call = map(encode, (ANSWER, REASONED, CALL))
        self._no_thought = encode(NO_THOUGHT)
        self._calls = {words: encode(_call(*call)) for words, call in CALLS.items()}
        self._answers = {words: encode(text) for words, text in ANSWERS.items()}
        self._assistant: int = tokenizer.convert_tokens_to_ids("<|assistant|>")
        self._quote, self._brace = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in '"}')
        self._ids = torch.empty(0, dtype=torch.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def embed(self, ids: Tensor) -> Tensor:
        self._ids = ids
        return self.real.embed(ids)

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
            said, num_skipped = context[start:], len(self._no_thought)
            may_reason = said[:num_skipped] != self._no_thought
            script = self._choose(question, has_tools=OFFERED in before, may_reason=may_reason)
            said = said if may_reason else said[num_skipped:]
            if said == script[: len(said)] and len(said) < len(script):
                logits[script[len(said)]] = NEXT
        return logits

    def _choose(self, question: str, *, has_tools: bool, may_reason: bool) -> list[int]:
        """Return the script for a question."""
        if ASKED in question and may_reason:
            return self._reasoned
        scripts = self._calls if has_tools else self._answers
        default = self._call if has_tools and RESULT not in question else self._answer
        return next((script for words, script in scripts.items() if words in question), default)


def _call(name: str, arguments: str) -> str:
    """Write a call as the template describes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _context(given: Any, kept: Tensor) -> list[int]:
    """Return a share's tokens: given as views of the storage, or as slots of it."""
    found = kept[given] if isinstance(given, Tensor) else given[0][0, 0, :, 0]
    return found.long().tolist()
