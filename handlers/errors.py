"""Every failure that a client of the handlers can see.

HandlerError
 +- BadInput: InvalidJson, InvalidRequest, UnsupportedMedia, ContextTooLong, SessionIdMismatch
 +- BadImage: NotAnImage, ImageTooLarge, ImageUrlForbidden, ImageUnreachable
 +- SessionGone: SessionUnknown, SessionExpired, SessionClosed, SessionLost
 +- NoRoom: Overloaded, OutOfMemory, OutOfDisk
 +- TurnTimedOut
 +- ClientGone
 +- ModelFailed: ModelUnknown, ModelLoaded, ModelLoading, LoadStopped, SourceUnavailable, ModelBroken (LoadTimedOut)
 +- TurnConflict
 +- JournalUnavailable
 +- InternalError

Each class has a status; its name is the code on the wire. Only the adapter turns one into HTTP.
"""

import json

from torchmoor.wire import headers


class HandlerError(Exception):
    """Base of all errors that are answered to a client; the message is for that client."""

    status = 500
    retry_after_s: int | None = None

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        """param: the request's field that is to blame, if it is one."""
        super().__init__(message)
        self.param = param

    @property
    def code(self) -> str:
        return type(self).__name__

    @property
    def message(self) -> str:
        return str(self)

    def headers(self) -> dict[str, str]:
        """The response headers that go with the error."""
        fields = {"Content-Type": "application/json", headers.ERROR: self.code}
        if self.retry_after_s is not None:
            fields["Retry-After"] = str(self.retry_after_s)
        return fields

    def body(self) -> bytes:
        """The JSON body, {"error": {"code", "message", "type", "param"}}: one that OpenAI's clients read, too."""
        error = {"code": self.code, "message": self.message, "type": self._type, "param": self.param}
        return json.dumps({"error": error}).encode()

    @property
    def _type(self) -> str:
        """OpenAI's word for whose fault it is."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


class ConfigError(RuntimeError):
    """A setting is wrong; raised while the worker starts, as the RuntimeError that TorchServe expects there."""


class BadInput(HandlerError):
    """The request cannot be understood or cannot be served as it stands."""

    status = 400


class InvalidJson(BadInput):
    """The body claims to be JSON and is not."""


class InvalidRequest(BadInput):
    """The body is well formed but a field is missing, unknown or out of range."""


class UnsupportedMedia(BadInput):
    """The body, or a part of it, is a video or a sound."""

    status = 415


class ContextTooLong(BadInput):
    """The conversation is longer than the model's context."""


class SessionIdMismatch(BadInput):
    """The session id in the header and the one in the body are not the same."""


class BadImage(HandlerError):
    """An image cannot be used."""

    status = 415


class NotAnImage(BadImage):
    """The bytes are no image of a known format, or a broken one."""


class ImageTooLarge(BadImage):
    """The image has more bytes or more pixels than a setting allows."""

    status = 413


class ImageUrlForbidden(BadImage):
    """The address is not one that this worker may fetch from."""

    status = 403


class ImageUnreachable(BadImage):
    """The address may be fetched, but did not answer with a body in time."""

    status = 502


class SessionGone(HandlerError):
    """The session cannot be continued."""

    status = 410


class SessionUnknown(SessionGone):
    """No session of this id was opened here, or it ended too long ago to be remembered."""

    status = 404


class SessionExpired(SessionGone):
    """The session's time is over."""


class SessionClosed(SessionGone):
    """The session was closed by its client."""


class SessionLost(SessionGone):
    """The session was opened and has not ended, but its memory is gone: its worker was restarted or replaced."""


class NoRoom(HandlerError):
    """The worker has no capacity for this now; another one may."""

    retry_after_s = 1


class Overloaded(NoRoom):
    """Too many requests in flight, sessions open, or turns waiting."""

    status = 429


class OutOfMemory(NoRoom):
    """The device's memory budget has no room for this session or turn."""

    status = 507


class OutOfDisk(NoRoom):
    """A disk has no room for the model that is to be unpacked, or for the image that is to be scaled down."""

    status = 507


class TurnTimedOut(HandlerError):
    """The turn was not finished before its deadline."""

    status = 504


class ClientGone(HandlerError):
    """The client left, or the proxy cancelled the request: usually nobody reads this."""

    status = 499


class ModelFailed(HandlerError):
    """One of many models cannot be used."""


class ModelUnknown(ModelFailed):
    """There is no model of this name where models come from; or none is loaded, where that was asked."""

    status = 404


class ModelBroken(ModelFailed):
    """The model is there, but cannot be unpacked or loaded; the message has the reason."""

    status = 424
    version = ""  # of the model, if it came to one


class ModelLoaded(ModelFailed):
    """The model was to be loaded and is loaded already."""

    status = 409


class ModelLoading(ModelFailed):
    """The model is not ready yet; the load goes on, so that a later request finds it."""

    status = 429
    retry_after_s = 5


class LoadTimedOut(ModelBroken):
    """A load took longer than it may."""


class LoadStopped(ModelFailed):
    """A load was given up because the worker ends."""

    status = 503
    retry_after_s = 1


class SourceUnavailable(ModelFailed):
    """The place where models come from cannot be read now, so nobody knows whether the model is there."""

    status = 503
    retry_after_s = 5


class TurnConflict(HandlerError):
    """Another instance finished a turn of this session first; this one's answer does not count."""

    status = 409


class JournalUnavailable(HandlerError):
    """The session's journal cannot be read or written, so nothing can be promised about the session."""

    status = 503
    retry_after_s = 1


class InternalError(HandlerError):
    """Our fault. The details are in the log under the inference id."""
