"""Settings of requests: `handler.request`."""

from typing import Literal

from pydantic import Field

from handlers.settings.group import Count, HandlerGroup, Switch


class RequestSettings(HandlerGroup, title="request"):
    """The bodies of requests, and what every request must state."""

    max_messages: Count = Field(512, description="Messages in an OpenAI body.")
    max_choices: Count = Field(8, description="Answers to one prompt of OpenAI's completions, which asks for `n`.")
    max_answers: Count = Field(64, description="Answers to one request: its prompts times `n`.")
    max_json_values: Count = Field(500_000, description="JSON values in a body, estimated before it is parsed.")
    inputs_form: Literal["tgi", "lmi", "lmi-json", "lmi-outputs"] = Field(
        "tgi",
        description="Form of answers to `inputs`, unless Accept requests another; lmi-json and lmi-outputs are those "
        "of LMI 0.25.",
    )
    requires_eula: Switch = Field(
        False, description="Refuse requests whose CustomAttributes do not contain accept_eula=true."
    )
