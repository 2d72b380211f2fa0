"""The handler's settings: the `handler:` group of an archive's model-config, overridden by the environment.

`TORCHMOOR_HANDLER_<GROUP>_<KEY>` wins over the file; commas separate the items of a list there. Each group is
a module of this package. The worker reads its settings once, in `initialize`, and passes each part its own group.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError, model_validator

from handlers.errors import SettingsError
from handlers.settings.adapters import AdapterSettings
from handlers.settings.engine import EngineSettings
from handlers.settings.grammar import GrammarSettings
from handlers.settings.group import HandlerGroup, describe, nested_groups, refusal
from handlers.settings.intake import IntakeSettings
from handlers.settings.journal import JournalSettings
from handlers.settings.many import ManySettings
from handlers.settings.model import ModelSettings
from handlers.settings.pump import PumpSettings
from handlers.settings.request import RequestSettings
from handlers.settings.session import ChatSessionSettings
from handlers.settings.tasks import TaskSettings
from handlers.settings.vllm import VllmSettings
from torchmoor.wire.handler_variables import ENV_PREFIX

# Settings that the engine vllm does not have; 0 asks for nothing.
OF_BUILTIN = (
    ("session", "kv_tokens"),
    ("journal", "max_kv_bytes"),
)
MAX_CHAR_BYTES = 6  # of a character in JSON, as in \u0001


class HandlerSettings(HandlerGroup):
    """All groups of settings of a worker."""

    model: ModelSettings = ModelSettings()
    session: ChatSessionSettings = ChatSessionSettings()
    intake: IntakeSettings = IntakeSettings()
    request: RequestSettings = RequestSettings()
    engine: EngineSettings = EngineSettings()
    vllm: VllmSettings = VllmSettings()
    grammar: GrammarSettings = GrammarSettings()
    pump: PumpSettings = PumpSettings()
    journal: JournalSettings = JournalSettings()
    many: ManySettings = ManySettings()
    adapters: AdapterSettings = AdapterSettings()
    tasks: TaskSettings = TaskSettings()

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        """Refuse settings that the chosen engine does not have."""
        if self.engine.name == "vllm":
            for group, key in OF_BUILTIN:
                if getattr(getattr(self, group), key):
                    raise refusal(f"{group}.{key}", "is not offered by the engine vllm")
            return self
        if self.model.tensor_parallel > 1:
            raise refusal(
                "model.tensor_parallel",
                f"is {self.model.tensor_parallel}, but the built-in engine serves its model from one device: set "
                "handler.engine.name to vllm (docs/gpu.md), or run one instance per GPU (torchmoor up --instances, or "
                "an endpoint with more instances)",
            )
        if self.vllm != VllmSettings():
            raise refusal("vllm", "needs handler.engine.name: vllm (docs/gpu.md)")
        return self

    @model_validator(mode="after")
    def _check_journal(self) -> Self:
        """Refuse limits with which the journal could not read back what clients may send."""
        if self.journal.url == "off":
            return self
        if self.journal.max_image_bytes < self.intake.max_bytes:
            raise refusal("journal.max_image_bytes", f"must be at least intake.max_bytes ({self.intake.max_bytes})")
        num_bytes = MAX_CHAR_BYTES * self.engine.max_question_chars
        if self.journal.max_event_bytes < num_bytes:
            raise refusal(
                "journal.max_event_bytes",
                f"must be at least {MAX_CHAR_BYTES} * engine.max_question_chars ({num_bytes})",
            )
        return self


def load_settings(config: Mapping[str, Any], environ: Mapping[str, str]) -> HandlerSettings:
    """Return the settings of a model-config's `handler:` group and the environment.

    Raises SettingsError on an unknown group or key, a value of the wrong type, or one out of range.
    """
    return HandlerSettings(**_with_variables(config, environ))


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise SettingsError on a variable whose name or value is wrong, whatever the archive's model-config says.

    Values that contradict each other are left to `load_settings`, because the model-config may have one of them.
    """
    try:
        HandlerSettings.model_validate(_with_variables({}, environ))
    except ValidationError as error:
        for details in error.errors(include_url=False):
            if len(details["loc"]) > 1:  # of a value, not of a group
                raise SettingsError(describe(HandlerSettings, details)) from None


def _with_variables(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a model-config's `handler:` group and the environment. Raises SettingsError."""
    variables = {
        f"{ENV_PREFIX}{name}_{key}".upper(): (name, key)
        for name, group in nested_groups(HandlerSettings)
        for key in group.model_fields
    }
    values: dict[str, Any] = {str(name): given or {} for name, given in config.items()}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in variables:
            raise SettingsError(f"{variable} is not a setting; docs/configuration.md lists them all")
        name, key = variables[variable]
        given = values.get(name, {})
        if isinstance(given, Mapping):
            values[name] = {**given, key: text}
    return values
