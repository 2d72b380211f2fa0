"""The dialect of TGI and LMI: bodies `{"inputs": ..., "parameters": {...}, "stream": ...}`, and their answers.

At /invocations, table.py recognises these bodies. For TGI's routes /generate and /generate_stream, the proxy adds a
header with the route, which determines the form of the answer.
"""

import json
from dataclasses import dataclass
from typing import Any

from handlers.chat.checks import check_unicode
from handlers.chat.commands import Generate
from handlers.chat.forms import AnswerForm, Summary, Token, encode
from handlers.chat.parameters import Parameters, check_fields, parse_parameters
from handlers.errors import BadImage, BadInput, HandlerError, InvalidRequest, NoRoom
from handlers.requests.incoming import Incoming
from handlers.settings.request import RequestSettings
from torchmoor.wire import headers as wire

_FIELDS = {"inputs", "parameters", "stream", "model"}  # huggingface_hub adds the model's name


def parse_inputs(incoming: Incoming, body: dict[str, Any], settings: RequestSettings) -> Generate:
    """Read a body with `inputs`. Raises InvalidRequest."""
    check_fields("a body with 'inputs'", body, _FIELDS)
    prompt = body.get("inputs")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("'inputs' must be a text that is not empty; send each prompt by itself", param="inputs")
    check_unicode(prompt, "'inputs'", "inputs")
    is_streaming = body.get("stream")
    if not isinstance(is_streaming, bool | None):
        raise InvalidRequest("'stream' must be true or false", param="stream")
    parameters = parse_parameters(body.get("parameters"))
    route = incoming.headers.get(wire.TGI_ROUTE)
    form = _form(incoming, parameters, prompt, settings.inputs_form)
    if route:
        is_streaming = route == wire.GENERATE_STREAM
    elif is_streaming is None:
        is_streaming = isinstance(form, LmiJsonForm)  # whose clients send no `stream`
    return Generate(
        caller=incoming.caller,
        prompt=prompt,
        messages=(),
        parameters=parameters,
        invocation_id=incoming.invocation_id,
        form=form,
        is_streaming=is_streaming,
    )


def _form(incoming: Incoming, parameters: Parameters, prompt: str, default: str) -> AnswerForm:
    """Choose the form by TGI's route, by Accept, else by the setting.

    LMI's clients send no Accept and rely on the endpoint.
    """
    text_before = prompt if parameters.return_full_text else ""
    if wire.TGI_ROUTE in incoming.headers:
        return TgiForm(text_before=text_before, has_details=parameters.details, is_list=False)
    accepts_lmi = incoming.accepts(LmiForm.content_type)
    if not accepts_lmi and (default == "tgi" or incoming.accepts(TgiForm.content_type)):
        return TgiForm(text_before=text_before, has_details=parameters.details)
    if not accepts_lmi and default == "lmi-json":
        return LmiJsonForm(text_before=text_before, has_details=parameters.details)
    are_outputs = default == "lmi-outputs"
    return LmiForm(text_before=text_before, has_details=parameters.details, are_outputs=are_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiForm:
    """Encodes TGI's answers: events `data:{"index", "token", "generated_text", "details"}`, or one object.

    is_list: a whole answer is a list with the object, as at TGI's path /; at /generate it is the object itself.
    """

    text_before: str = ""
    has_details: bool = False
    is_list: bool = True

    content_type = "text/event-stream"

    def begin(self) -> bytes:
        return b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        value: dict[str, object] = {"index": token.number, "token": _tgi_token(token, token.text)}
        if token.top:
            value["top_tokens"] = [_tgi_token(each, each.own_text) for each in token.top]
        value |= {
            "generated_text": None if summary is None else self.text_before + summary.text,
            "details": None if summary is None else details_of(summary),
        }
        return _event(value)

    def error(self, error: HandlerError) -> bytes:
        return _event({"error": error.message, "error_type": _tgi_error_type(error)})

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"generated_text": self.text_before + summary.text}
        if self.has_details:
            tokens = [_tgi_token(token, token.own_text) for token in summary.tokens]
            details = {**details_of(summary), "prefill": [], "tokens": tokens}
            if any(token.top for token in summary.tokens):
                details["top_tokens"] = [
                    [_tgi_token(each, each.own_text) for each in token.top] for token in summary.tokens
                ]
            body["details"] = details
        return encode([body] if self.is_list else body)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiForm:
    """Encodes LMI's answers: one JSON object per line, `generated_text` and `details` in the last; or one object.

    are_outputs: the older lines, `{"outputs": ["text"]}`.
    """

    text_before: str = ""
    has_details: bool = False
    are_outputs: bool = False

    content_type = "application/jsonlines"

    def begin(self) -> bytes:
        if self.are_outputs and self.text_before:
            return _line({"outputs": [self.text_before]})
        return b""

    def token(self, token: Token, summary: Summary | None) -> bytes:
        if self.are_outputs:
            return _line({"outputs": [token.text]}) if token.text else b""
        value: dict[str, object] = {"token": _lmi_token(token, token.text)}
        if summary is not None:
            value["generated_text"] = self.text_before + summary.text
            value["details"] = details_of(summary)
        return _line(value)

    def error(self, error: HandlerError) -> bytes:
        return _line({"error": error.message, "code": error.status})

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"generated_text": self.text_before + summary.text}
        if self.has_details:
            body["details"] = {
                **details_of(summary),
                "tokens": [_lmi_token(token, token.own_text) for token in summary.tokens],
            }
        return encode(body)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiJsonForm:
    """Encodes LMI 0.25's `json`: one object whose only text is written as it is generated.

    The bytes are those of DJL's formatter: `{"generated_text": "` with a space, the escaped text, `"}`.
    """

    text_before: str = ""
    has_details: bool = False

    content_type = "application/json"

    def begin(self) -> bytes:
        return b'{"generated_text": "' + _escape(self.text_before)

    def token(self, token: Token, summary: Summary | None) -> bytes:
        text = _escape(token.text)
        if summary is None:
            return text
        details = b', "details": ' + encode(details_of(summary)) if self.has_details else b""
        return text + b'"' + details + b"}"

    def error(self, error: HandlerError) -> bytes:
        return b'", "error": ' + encode(error.message) + b', "code": %d}' % error.status

    def whole(self, summary: Summary) -> bytes:
        body: dict[str, object] = {"generated_text": self.text_before + summary.text}
        if self.has_details:
            body["details"] = details_of(summary)
        return json.dumps(body, ensure_ascii=False).encode()


def details_of(summary: Summary) -> dict[str, object]:
    """Return TGI's `details` of an answer, which LMI and the session API have, too."""
    return {
        "finish_reason": summary.finish_reason,
        "generated_tokens": summary.num_tokens,
        "input_length": summary.num_prompt_tokens,
        "seed": summary.seed,
    }


def _escape(text: str) -> bytes:
    """Return the inside of a JSON string."""
    return encode(text)[1:-1]


def _event(value: Any) -> bytes:
    """Encode a server-sent event like TGI's, without a space: clients remove exactly the five characters "data:"."""
    return b"data:" + encode(value) + b"\n\n"


def _line(value: Any) -> bytes:
    return encode(value) + b"\n"


def _tgi_token(token: Token, text: str) -> dict[str, object]:
    """Encode a token. text: in a stream, the text that this token completes; clients join the texts."""
    return {"id": token.id, "text": text, "logprob": token.logprob, "special": token.is_special}


def _lmi_token(token: Token, text: str) -> dict[str, object]:
    return {"id": token.id, "text": text, "log_prob": token.logprob, "special_token": token.is_special}


def _tgi_error_type(error: HandlerError) -> str:
    """Return TGI's error type, by which its clients choose their exceptions."""
    if isinstance(error, BadInput | BadImage):
        return "validation"
    return "overloaded" if isinstance(error, NoRoom) else "generation"
