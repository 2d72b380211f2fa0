"""Bodies of Text Generation Inference and of LMI: `{"inputs": ..., "parameters": {...}, "stream": ...}`."""

from typing import Any

from handlers.chat.checks import is_unicode, names
from handlers.chat.commands import Generate
from handlers.chat.dialects.session import refuse_session
from handlers.chat.forms import AnswerForm, LmiForm, TgiForm
from handlers.chat.parameters import Parameters, parse_parameters
from handlers.errors import InvalidRequest
from handlers.requests import Incoming
from handlers.settings import RequestSettings

_FIELDS = {"inputs", "parameters", "stream", "model"}  # huggingface_hub adds the model's name


def parse_inputs(incoming: Incoming, body: dict[str, Any], settings: RequestSettings) -> Generate:
    """Raises InvalidRequest."""
    refuse_session(incoming, body)
    unknown = set(body) - _FIELDS
    if unknown:
        raise InvalidRequest(f"a body with 'inputs' has no field {names(unknown)}")
    prompt = body["inputs"]
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest("'inputs' must be a text that is not empty; send each prompt by itself", param="inputs")
    if not is_unicode(prompt):
        raise InvalidRequest("'inputs' must be valid Unicode: it has one half of a surrogate pair", param="inputs")
    is_streaming = body.get("stream")
    is_streaming = False if is_streaming is None else is_streaming
    if not isinstance(is_streaming, bool):
        raise InvalidRequest("'stream' must be true or false", param="stream")
    parameters = parse_parameters(body.get("parameters"))
    return Generate(
        caller=incoming.caller,
        prompt=prompt,
        messages=(),
        parameters=parameters,
        invocation_id=incoming.invocation_id,
        form=_form(incoming, parameters, prompt, settings.inputs_form),
        is_streaming=is_streaming,
    )


def _form(incoming: Incoming, parameters: Parameters, prompt: str, default: str) -> AnswerForm:
    """By Accept, else by the setting: clients of LMI send no Accept, it is their endpoint that was configured."""
    text_before = prompt if parameters.return_full_text else ""
    if incoming.accepts(LmiForm.content_type):
        is_lmi = True
    elif incoming.accepts(TgiForm.content_type):
        is_lmi = False
    else:
        is_lmi = default != "tgi"
    if is_lmi:
        are_outputs = default == "lmi-outputs"
        return LmiForm(text_before=text_before, has_details=parameters.details, are_outputs=are_outputs)
    return TgiForm(text_before=text_before, has_details=parameters.details)
