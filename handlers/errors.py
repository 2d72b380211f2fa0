"""Errors that the handlers answer to clients.

HandlerError
 +- BadInput: InvalidJson, InvalidRequest, EulaNotAccepted, NotAcceptable, UnsupportedMedia, ContextTooLong,
 |     SessionIdMismatch
 +- BadImage: NotAnImage, ImageTooLarge, ImageUrlForbidden, ImageUnreachable
 +- SessionGone: SessionUnknown, SessionExpired, SessionClosed, SessionLost
 +- ResponseUnknown
 +- SessionLimitReached
 +- CallerBudgetReached
 +- NoRoom: Overloaded, OutOfMemory, OutOfDisk
 +- TurnTimedOut
 +- ClientGone
 +- ModelUnknown, ModelLoaded, ModelLoading, LoadStopped, SourceUnavailable, ModelBroken (LoadTimedOut): of many models
 +- TurnConflict
 +- JournalUnavailable
 +- InternalError

Each class has a status, and its name is the code on the wire. Only the pump turns an error into HTTP.
"""

import json

from torchmoor.wire import headers

# Messages of errors that several modules raise.
MODEL_FAILED = "the model failed on this conversation; see the worker's log"
STOPPING = "the worker is stopping"
# LangChain recognizes the error by "prompt is too long", and LiteLLM by "model's maximum context limit".
PROMPT_TOO_LONG = "the prompt is too long, above the model's maximum context limit or the worker's"


class HandlerError(Exception):
    """Base of all errors that are answered to a client. The message is for the client; `text` is its default."""

    status = 500
    text = ""
    retry_after_s: int | None = None

    def __init__(self, message: str = "", *, param: str | None = None, api_code: str = "") -> None:
        """param: the field of the request that caused the error, if any. api_code: OpenAI's code, where it has one."""
        super().__init__(message or self.text)
        self.param = param
        self.api_code = api_code

    @property
    def code(self) -> str:
        return type(self).__name__

    @property
    def message(self) -> str:
        return str(self)

    def headers(self) -> dict[str, str]:
        fields = {"Content-Type": "application/json", headers.ERROR: self.code}
        if self.retry_after_s is not None:
            fields["Retry-After"] = str(self.retry_after_s)
        return fields

    def body(self) -> bytes:
        """Return the JSON body {"error": {"code", "message", "type", "param"}}, which OpenAI's clients can read."""
        code = self.api_code or self.code
        error = {"code": code, "message": self.message, "type": self._type, "param": self.param}
        return json.dumps({"error": error}).encode()

    @property
    def _type(self) -> str:
        """OpenAI's type of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class SettingsError(RuntimeError):
    """Raised while the worker starts if a setting is wrong. TorchServe expects a RuntimeError there."""


class NoMemoryForModel(SettingsError):
    """The device has no free memory for the model."""


class BadInput(HandlerError):
    """The request cannot be parsed, or cannot be served as it is."""

    status = 400


class InvalidJson(BadInput):
    """The body must be JSON and is not."""


class InvalidRequest(BadInput):
    """The body is well formed but a field is missing, unknown or out of range."""


class EulaNotAccepted(BadInput):
    """The request does not accept the model's license, which the settings require."""

    status = 424


class NotAcceptable(BadInput):
    """The client accepts no media type that the answer can have."""

    status = 406


class UnsupportedMedia(BadInput):
    """The body or a part of it is video or audio."""

    status = 415


class ContextTooLong(BadInput):
    """The conversation exceeds the model's context."""


class SessionIdMismatch(BadInput):
    """The session ids in the header and in the body differ."""


class BadImage(HandlerError):
    """An image cannot be used."""

    status = 415


class NotAnImage(BadImage):
    """The bytes are not an image of a known format, or the image is broken."""


class ImageTooLarge(BadImage):
    """The image exceeds a limit of bytes or pixels."""

    status = 413


class ImageUrlForbidden(BadImage):
    """This worker may not fetch from the address."""

    status = 403


class ImageUnreachable(BadImage):
    """The address did not answer with an image in time."""

    status = 502


class SessionGone(HandlerError):
    """The session cannot be continued."""

    status = 410


class SessionUnknown(SessionGone):
    """No session of this id was opened, or it ended so long ago that it is forgotten."""

    status = 404
    text = "no session of this id is known; open one with a start_session request"


class SessionExpired(SessionGone):
    """The session's time to live is over."""

    text = "this session has expired; open a new one"


class SessionClosed(SessionGone):
    """The session was closed by its client."""

    text = "this session was closed; open a new one"


class SessionLost(SessionGone):
    """The session has not ended, but its memory is gone: its worker was replaced, or its journal is damaged."""

    text = "this session's memory is gone, because its worker was restarted or replaced; open a new one"
    damaged_text = "this session's journal is damaged; open a new one"


class ResponseUnknown(HandlerError):
    """No response or conversation of this id is stored for this caller: it never was, or it has ended."""

    status = 404


class ResponseCancelled(HandlerError):
    """The response in the background has ended without an answer, mostly because a client has cancelled it."""

    status = 409


class SessionLimitReached(HandlerError):
    """The caller has as many open sessions as the proxy allows."""

    status = 429
    retry_after_s = 1


class CallerBudgetReached(HandlerError):
    """The caller's sessions have reached the journal's limit per caller, which all workers share."""

    status = 429


class NoRoom(HandlerError):
    """The worker has no capacity for this request now; another worker may have."""

    retry_after_s = 1


class Overloaded(NoRoom):
    """Too many requests are in flight, sessions open, or turns waiting."""

    status = 429


class OutOfMemory(NoRoom):
    """The memory budget of the device is exhausted."""

    status = 507


class OutOfDisk(NoRoom):
    """A disk has no space to unpack a model or to store an image while it is scaled down."""

    status = 507


class TurnTimedOut(HandlerError):
    """The turn did not finish before its deadline."""

    status = 504
    text = "the answer was not finished before the turn's deadline"


class ClientGone(HandlerError):
    """The client left, or the proxy cancelled the request. Usually no client reads this error."""

    status = 499


class ModelUnknown(HandlerError):
    """The model store has no model of this name, or the operation needs a loaded model and it is not loaded."""

    status = 404


class ModelBroken(HandlerError):
    """The model cannot be unpacked or loaded; the message has the reason."""

    status = 424
    version = ""  # of the model, if it is known


class ModelLoaded(HandlerError):
    """The model is loaded already."""

    status = 409


class ModelLoading(HandlerError):
    """The model is not ready yet. The load continues for later requests."""

    status = 429
    retry_after_s = 5


class LoadTimedOut(ModelBroken):
    """A load exceeded its time limit."""


class LoadStopped(HandlerError):
    """A load was aborted because the worker stops."""

    status = 503
    text = STOPPING
    retry_after_s = 1


class SourceUnavailable(HandlerError):
    """The model store cannot be read now, so it is unknown whether it has the model."""

    status = 503
    retry_after_s = 5


class TurnConflict(HandlerError):
    """Another instance finished a turn of this session first, so this answer is discarded."""

    status = 409


class JournalUnavailable(HandlerError):
    """The session's journal cannot be read or written, so the session cannot be continued safely."""

    status = 503
    retry_after_s = 1


class InternalError(HandlerError):
    """A fault of the handlers. The log has the details under the inference id."""
