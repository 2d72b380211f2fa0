"""The operation `models`: operators and the proxy load, unload, pin and prewarm models by name."""

import logging
from typing import Any

from handlers.errors import HandlerError, InvalidRequest
from handlers.many.request import read_body
from handlers.many.residency.registry import ModelRegistry
from handlers.requests.incoming import Incoming
from handlers.requests.reply import PendingReply
from torchmoor.wire import operations
from torchmoor.wire.operations import ACTION, MODEL, MODEL_ACTIONS, URL

logger = logging.getLogger(__name__)
MAX_VALUES = 100  # of the body of an operation


def manage_models(registry: ModelRegistry, incoming: Incoming, reply: PendingReply) -> None:
    """Do the body's action. A load or unload is answered when it is done, other actions at once. Raises HandlerError.

    A pin or prewarm of an unknown model fails, so its answer waits for the source if the model is not in memory.
    """
    action, name, url = _read_action(read_body(incoming, MAX_VALUES))

    def done(error: HandlerError | None) -> None:
        if error is not None:
            reply.fail(error)
        else:
            tiers = {model["name"]: model["tier"] for model in reversed(registry.status()["models"])}
            reply.finish_json({MODEL: name, "tier": tiers.get(name, "source")})

    if action == operations.LOAD:
        registry.load(name, url, done)
    elif action == operations.UNLOAD:
        registry.unload(name, done)
    elif action == operations.UNPIN:
        registry.unpin(name)
        done(None)
    else:
        start = registry.pin if action == operations.PIN else registry.prewarm
        errors: list[HandlerError] = []

        def note(error: HandlerError | None) -> None:
            if error is not None:
                logger.warning("model not loaded name=%s reason=%s", name, error.message)
                errors.append(error)

        def found(error: HandlerError | None) -> None:
            if error is None:
                start(name, note)
            done(error or (errors[0] if errors else None))  # the status shows later errors

        registry.look_up(name, found)


def _read_action(body: Any) -> tuple[str, str, str | None]:
    """Read a models operation: action, name, url. Raises InvalidRequest."""
    if not isinstance(body, dict) or body.keys() - {ACTION, MODEL, URL}:
        raise InvalidRequest("a models operation has 'action', 'model' and perhaps 'url'")
    action, name, url = body.get(ACTION), body.get(MODEL), body.get(URL)
    if action not in MODEL_ACTIONS:
        raise InvalidRequest(f"'action' must be one of {', '.join(MODEL_ACTIONS)}", param=ACTION)
    if not isinstance(name, str) or not name:
        raise InvalidRequest("'model' must name a model", param=MODEL)
    if url is not None and (not isinstance(url, str) or action != operations.LOAD):
        raise InvalidRequest("'url' goes with the action 'load', and is a text", param=URL)
    return action, name, url
