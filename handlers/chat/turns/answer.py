"""The answer on its way to the client: its receipt, its tokens and its end."""

from handlers.chat.forms import AnswerForm, Summary, Token
from handlers.engine.detokenizer import Detokenizer
from handlers.engine.sequence import FinishReason, TokenEvent
from handlers.models.text import TextModel
from handlers.reply import JSON, PendingReply
from torchmoor.wire import headers as wire


class AnswerWriter:
    """Writes an answer in its dialect's form, as a stream or whole.

    receipt: response headers that say what the answer cost; sent with the first byte.
    """

    def __init__(
        self, reply: PendingReply, form: AnswerForm, model: TextModel, stop: tuple[str, ...], *, is_streaming: bool
    ) -> None:
        self.receipt: dict[str, str] = {}
        self._reply = reply
        self._form = form
        self._eos_token_ids = model.eos_token_ids
        self._is_streaming = is_streaming
        self._detokenizer = Detokenizer(model.tokenizer, stop)
        self._kept: list[Token] = []  # of an answer that is not streamed

    @property
    def text(self) -> str:
        """The text that is certain so far."""
        return self._detokenizer.text

    @property
    def tokens(self) -> list[Token]:
        """The tokens of an answer that is not streamed."""
        return self._kept

    def push(self, event: TokenEvent) -> tuple[Token, FinishReason | None]:
        """Detokenize one more token; return it with the finish reason if it is the last."""
        assert event.token_id is not None
        reason = event.finish_reason
        text = self._detokenizer.push(event.token_id)
        if reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.is_stopped:
            reason = FinishReason.STOP
        token = Token(event.token_id, text, event.logprob, event.token_id in self._eos_token_ids)
        if not self._is_streaming:
            self._kept.append(token)
        return token, reason

    def show(self, token: Token) -> None:
        """Stream a token that others follow."""
        if self._is_streaming:
            self._write(token, None)

    def end(self, token: Token, summary: Summary) -> None:
        """Send the last token and the end of the stream, or the whole answer."""
        if self._is_streaming:
            self._write(token, summary)
        else:
            num_tokens = {wire.GENERATED_TOKENS: str(summary.num_tokens)}
            headers = {**JSON, **self.receipt, **num_tokens}
            self._reply.finish(headers, self._form.whole(summary))

    def end_with(self, text: str) -> None:
        """Send a stored answer."""
        self.receipt[wire.CACHE_TIER] = "answer"
        reason = FinishReason.EOS.value
        summary = Summary(text=text, finish_reason=reason, num_tokens=0, num_prompt_tokens=0, seed=None)
        self.end(Token(0, text, 0.0, False), summary)

    def _write(self, token: Token, summary: Summary | None) -> None:
        if not self._reply.is_streaming:
            headers = {"Content-Type": self._form.content_type, **self.receipt}
            self._reply.begin(headers, self._form.error)
            self._reply.write(self._form.begin())
        self._reply.write(self._form.token(token, summary), is_end=summary is not None)
