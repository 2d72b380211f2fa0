"""The variables that the proxy's programs and the handlers share."""

from handlers.settings.group import nested_groups
from handlers.settings.handler import HandlerSettings
from torchmoor.wire import handler_variables
from torchmoor.wire.handler_variables import ENV_PREFIX


def test_each_variable_is_one_of_a_setting() -> None:
    """A worker refuses variables with its prefix that it does not know, so it would not start."""
    variables = {value for name, value in vars(handler_variables).items() if name.isupper() and isinstance(value, str)}
    known = {
        f"{ENV_PREFIX}{name}_{key}".upper()
        for name, group in nested_groups(HandlerSettings)
        for key in group.model_fields
    }

    assert len(variables - {ENV_PREFIX}) > 10
    assert variables - {ENV_PREFIX} <= known
