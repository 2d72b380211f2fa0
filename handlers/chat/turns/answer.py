"""What the client gets to see of one answer: its receipt, its tokens as they come, its end."""

from handlers.chat.forms import AnswerForm, Summary, Token
from handlers.engine.detokenizer import Detokenizer
from handlers.engine.sequence import FinishReason, TokenEvent
from handlers.models.text import TextModel
from handlers.reply import Reply
from torchmoor.wire import headers as wire


class Answer:
    """Streamed or kept until it is whole, in its dialect's form.

    receipt: response headers that say what the answer cost; they go out with the first byte.
    """

    def __init__(
        self, reply: Reply, form: AnswerForm, model: TextModel, stop: tuple[str, ...], *, is_streaming: bool
    ) -> None:
        self.receipt: dict[str, str] = {}
        self._reply = reply
        self._form = form
        self._eos_token_ids = model.eos_token_ids
        self._is_streaming = is_streaming
        self._detokenizer = Detokenizer(model.tokenizer, stop)
        self._kept: list[Token] = []  # for an answer that tells of them at its end

    @property
    def text(self) -> str:
        """As far as it is certain."""
        return self._detokenizer.text

    @property
    def tokens(self) -> list[Token]:
        """Those of an answer that is not streamed."""
        return self._kept

    def push(self, event: TokenEvent) -> tuple[Token, FinishReason | None]:
        """One more token, as it is shown, and why it is the last if it is; a stop string may say so, too."""
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
        """A token that others follow, if the client wants to see it now."""
        if self._is_streaming:
            self._write(token, None)

    def end(self, token: Token, summary: Summary) -> None:
        """The last token and the end of the stream; or the whole answer."""
        if self._is_streaming:
            self._write(token, summary)
        else:
            num_tokens = {wire.GENERATED_TOKENS: str(summary.num_tokens)}
            headers = {"Content-Type": self._form.whole_content_type, **self.receipt, **num_tokens}
            self._reply.finish(headers, self._form.whole(summary))

    def end_with(self, text: str) -> None:
        """An answer that was given before, and is known whole."""
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
