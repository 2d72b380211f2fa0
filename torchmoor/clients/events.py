"""Reader of boto3's invoke_endpoint_with_response_stream, whose PayloadParts may split a line anywhere."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from botocore.eventstream import ParserError
from botocore.exceptions import BotoCoreError, EventStreamError
from urllib3.exceptions import HTTPError

from torchmoor.clients.errors import ModelStreamError, StreamCut
from torchmoor.clients.pieces import Piece
from torchmoor.clients.streams import read_stream
from torchmoor.wire.error_codes import STREAM_CODES


def read_event_stream(events: Iterable[Mapping[str, Any]], stop: Sequence[str] = ()) -> Generator[Piece, None, None]:
    """Yield the pieces of the answer in `response["Body"]`, and close it at the end.

    Raises StreamError; `received` is the text so far.
    """
    return read_stream(payload_parts(events), stop)


def payload_parts(events: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield the bytes of each part. Closes `events` at the end. Raises ModelStreamError, StreamCut."""
    try:
        for event in events:
            if "PayloadPart" in event:
                yield event["PayloadPart"]["Bytes"]
            for code in ("ModelStreamError", "InternalStreamFailure"):  # a client that does not raise them itself
                if code in event:
                    raise _model_stream_error(code, event[code].get("Message", ""))
    except EventStreamError as error:
        details = error.response.get("Error", {})
        raise _model_stream_error(details.get("Code", "ModelStreamError"), details.get("Message", "")) from error
    except (HTTPError, BotoCoreError, ParserError, OSError) as error:
        raise StreamCut(f"the connection was lost before the answer was complete ({type(error).__name__})") from error
    finally:
        with suppress(HTTPError, OSError):
            getattr(events, "close", lambda: None)()


def abort(events: Any) -> None:
    """End a stream that another thread reads. Safe in any thread.

    It shuts the socket down, since a close does not wake a thread that waits for the network.
    """
    raw = getattr(events, "_raw_stream", None)  # urllib3's response; boto3 has no public name for it
    with suppress(AttributeError, ValueError, RuntimeError, HTTPError, OSError):  # it is over already
        raw.shutdown()  # type: ignore[union-attr]


def _model_stream_error(code: str, message: str) -> ModelStreamError:
    error_code = next((word for word in STREAM_CODES if word in message), None)
    return ModelStreamError(message or "the endpoint ended the stream", code=code, error_code=error_code)
