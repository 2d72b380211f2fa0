"""Configurations with one value changed."""

import copy
from typing import Any


def with_value(content: Any, path: str, value: object) -> Any:
    """Return a copy with the value at a path like Endpoints.0.EndpointConfig; None deletes it."""
    content = copy.deepcopy(content)
    *parents, last = path.split(".")
    at: Any = content
    for key in parents:
        at = at[int(key)] if key.isdigit() else at.setdefault(key, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return content
