"""AWS's JSON and CBOR protocols: finds an operation, checks its input and shapes its output by botocore's models."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from botocore.model import OperationModel, Shape

from torchmoor.config.aws import check_constraints, check_input, service_model
from torchmoor.control import cbor
from torchmoor.errors import ApiError, ConfigError, InternalFailure, RequestInvalid, UnknownControlOperation
from torchmoor.proxy.api.control_operation import ControlRequest
from torchmoor.proxy.http.message import Reply
from torchmoor.wire.json_values import count_values

logger = logging.getLogger(__name__)

MAX_VALUES = 10_000  # of a body: a value takes the check against botocore's model up to 25 microseconds
MAX_REASON_CHARS = 4_096  # of an error about the input, which quotes it

Values = Mapping[str, Any]
Operation = Callable[[Values], Values | Awaitable[Values]]

CONTENT_TYPE = (b"content-type", b"application/x-amz-json-1.1")
CBOR_HEADERS = ((b"content-type", b"application/cbor"), (b"smithy-protocol", b"rpc-v2-cbor"))


class Service:
    """The operations of one of AWS's services that this host serves.

    operations: by their names in botocore's model. hint: for the error about any other operation.
    """

    def __init__(self, name: str, operations: Mapping[str, Operation], *, hint: str = "") -> None:
        model = service_model(name)
        self.name = name
        self._hint = hint
        self.prefix = str(model.metadata["targetPrefix"])
        self._operations = {key: (model.operation_model(key), operation) for key, operation in operations.items()}

    async def call(self, operation: str, body: bytes, reading: asyncio.Lock, *, is_cbor: bool) -> dict[str, Any]:
        """Run an operation on a request's body, which is read in a thread. reading: held meanwhile. Raises ApiError."""
        found = self._operations.get(operation)
        if found is None:
            raise UnknownControlOperation(
                f"{self.name} has no operation {operation[:64]!r} here. Served are {', '.join(self._operations)}."
                f"{self._hint}"
            )
        model, run = found
        async with reading:
            values = await asyncio.to_thread(read_input, model, body, is_cbor=is_cbor)
        output = run(values)
        if inspect.isawaitable(output):
            output = await output
        shape = model.output_shape
        return {} if shape is None else _shaped(output, shape, is_cbor=is_cbor)


class ControlPlane:
    """Answers the requests of all services that are served. Reads one body at a time, beside the event loop."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.prefix: service for service in services}
        self._reading = asyncio.Lock()

    async def answer(self, request: ControlRequest) -> Reply:
        target, is_cbor = request.target, request.is_cbor
        try:
            prefix, _, operation = target.rpartition(".")
            service = self._services.get(prefix)
            if service is None:
                known = ", ".join(f"{each.name} ({each.prefix})" for each in self._services.values())
                raise UnknownControlOperation(
                    f"X-Amz-Target {target[:128]!r} names no service that is served here: {known}."
                )
            return _render(
                200, await service.call(operation, request.body, self._reading, is_cbor=is_cbor), is_cbor=is_cbor
            )
        except ApiError as error:
            return refuse(error, is_cbor=is_cbor)
        except OSError as error:  # a change that cannot be saved is taken back
            logger.error("change not recorded target=%s error=%s", target[:128], error)
            reason = error.strerror or type(error).__name__
            return refuse(InternalFailure(f"The control plane cannot record the change: {reason}."), is_cbor=is_cbor)
        except Exception:
            logger.exception("fault target=%s", target[:128])
            return refuse(InternalFailure("The control plane failed; its log has the reason."), is_cbor=is_cbor)


def refuse(error: ApiError, *, is_cbor: bool) -> Reply:
    """Render an error that boto3 raises as the exception named by `error.kind`."""
    reply = _render(error.status, {"__type": error.kind, "message": error.message}, is_cbor=is_cbor)
    return Reply(reply.status, (*reply.headers, (b"x-amzn-errortype", error.kind.encode())), reply.body)


def _render(status: int, content: dict[str, Any], *, is_cbor: bool) -> Reply:
    if is_cbor:
        return Reply(status, CBOR_HEADERS, cbor.write(content))
    return Reply(status, (CONTENT_TYPE,), json.dumps(content).encode())


def read_input(model: OperationModel, body: bytes, *, is_cbor: bool) -> Values:
    """Return the input that a body holds. Raises RequestInvalid unless botocore's model allows it."""
    num_values = cbor.count_items(body, MAX_VALUES) if is_cbor else count_values(body)
    if num_values > MAX_VALUES:
        raise RequestInvalid(f"The body has more than {MAX_VALUES} values, which no operation needs.")
    values = (cbor.read(body) if body else {}) if is_cbor else _read_json(body)
    if not isinstance(values, dict):
        raise RequestInvalid("The body must be a JSON object, or a map in CBOR.")
    shape = model.input_shape
    if shape is None:
        return {}
    try:
        values = {key: _without_null(item) for key, item in values.items() if item is not None}
        check_input(values, shape, model.name)
        check_constraints(values, shape, model.name)
    except ConfigError as error:
        reason = str(error)
        is_long = len(reason) > MAX_REASON_CHARS
        raise RequestInvalid(f"{reason[:MAX_REASON_CHARS]}..." if is_long else reason) from error
    except RecursionError as error:
        raise RequestInvalid("The body's values are nested too deeply.") from error
    return values


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f"The body is not valid JSON: {error}") from error


def _without_null(value: Any) -> Any:
    """Return a JSON value without members that are null, which mean the same as absent ones."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _shaped(value: Any, shape: Shape, *, is_cbor: bool) -> Any:
    """Return a value as the protocol writes it: no member without a value, times in JSON in seconds since 1970."""
    shaped = partial(_shaped, is_cbor=is_cbor)
    if shape.type_name == "structure":
        return {key: shaped(item, shape.members[key]) for key, item in value.items() if item is not None}
    if shape.type_name == "list":
        return [shaped(item, shape.member) for item in value]
    if shape.type_name == "map":
        return {key: shaped(item, shape.value) for key, item in value.items()}
    return value.timestamp() if isinstance(value, datetime) and not is_cbor else value
