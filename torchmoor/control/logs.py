"""CloudWatch Logs of endpoints: a group for each endpoint, a stream for each instance, from TorchServe's log files.

An event's place is its offset in the file, which tokens contain.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchmoor.config.launcher import INSTANCE_LOG
from torchmoor.control.listing import read_token, write_token
from torchmoor.control.log_files import PIECE_BYTES, LogEvent, LogReader, merge, read_backward, read_forward
from torchmoor.control.protocol import Operation, Values
from torchmoor.errors import LogMissing, RequestInvalid
from torchmoor.proxy.instances.registry import Registry

GROUPS = "/aws/sagemaker/Endpoints/"
MAX_EVENTS = 10_000  # in one answer, as at AWS
MAX_STREAMS = 50
_BAD_TOKEN = "nextToken is not valid: use the one of the previous page."
_TERM = re.compile(r'(?P<sign>[-?]?)(?:"(?P<phrase>[^"]*)"|(?P<word>\S+))')


class EndpointLogs:
    """The logs of instances that run or start on this host. run_dir: the parent of their folders."""

    def __init__(self, registry: Registry, run_dir: Path) -> None:
        self._registry = registry
        self._run_dir = run_dir

    def operations(self) -> dict[str, Operation]:
        """Return the operations by their names."""
        return {
            "DescribeLogStreams": self._describe_streams,
            "GetLogEvents": self._get_events,
            "FilterLogEvents": self._filter_events,
        }

    async def _describe_streams(self, values: Values) -> Values:
        names = self._find_streams(values, values.get("logStreamNamePrefix", ""))
        names.sort(reverse=values.get("descending", False))
        size = values.get("limit", MAX_STREAMS)
        names = _after(names, values.get("nextToken"))
        streams = []
        for name in names[:size]:
            path = self._path(name)
            first, _ = await asyncio.to_thread(read_forward, path, 0, 1, _any)
            last, *_ = await asyncio.to_thread(read_backward, path, None, 1, _any, 2 * PIECE_BYTES)
            times = {"firstEventTimestamp": first[0].at, "lastEventTimestamp": last[0].at} if first and last else {}
            streams.append({"logStreamName": name, "storedBytes": 0, **times})
        return {"logStreams": streams, "nextToken": names[size - 1] if len(names) > size else None}

    async def _get_events(self, values: Values) -> Values:
        name, size = values["logStreamName"], values.get("limit", MAX_EVENTS)
        if name not in self._find_streams(values, ""):
            raise LogMissing("The specified log stream does not exist.")
        direction, offset = _read_place(values.get("nextToken"))
        is_forward = direction == "f" or (direction == "" and values.get("startFromHead", False))
        path, accepts = self._path(name), _within(values)
        if is_forward:
            begin = offset or 0
            found, end = await asyncio.to_thread(read_forward, path, begin, size, accepts)
        else:
            found, begin, end = await asyncio.to_thread(read_backward, path, offset, size, accepts)
        return {
            "events": [_show(event) for event in found],
            "nextForwardToken": f"f/{end}",
            "nextBackwardToken": f"b/{begin}",
        }

    async def _filter_events(self, values: Values) -> Values:
        streams = self._find_streams(values, values.get("logStreamNamePrefix", ""))
        wanted, matches = values.get("logStreamNames", streams), _read_pattern(values.get("filterPattern", ""))
        if not set(wanted) <= set(streams):
            raise LogMissing("The specified log stream does not exist.")
        places, is_in_time = _read_places(values.get("nextToken")), _within(values)
        readers = {name: LogReader(self._path(name), places.get(name, 0)) for name in wanted}

        def accepts(event: LogEvent) -> bool:
            return is_in_time(event) and matches(event.message)

        found, next_places = await asyncio.to_thread(merge, readers, values.get("limit", MAX_EVENTS), accepts)
        return {
            "events": [
                {"logStreamName": name, "eventId": f"{name}/{event.offset}", **_show(event)} for name, event in found
            ],
            "searchedLogStreams": [],
            "nextToken": None if next_places is None else write_token(next_places),
        }

    def _find_streams(self, values: Values, prefix: str) -> list[str]:
        """Return the streams of a request's group. Raises LogMissing."""
        group = values.get("logGroupName") or values.get("logGroupIdentifier", "").rpartition(":log-group:")[2]
        name = group.removesuffix(":*").removeprefix(GROUPS)
        instances = [each for each in self._registry.instances() if each.endpoint == name]
        if not group.startswith(GROUPS) or not (instances or self._registry.find_endpoint(name)):
            raise LogMissing("The specified log group does not exist.")
        streams = [f"{each.variant}/{each.name}" for each in instances]
        return [stream for stream in streams if stream.startswith(prefix)]

    def _path(self, stream: str) -> Path:
        return self._run_dir / stream.rpartition("/")[2] / INSTANCE_LOG


def _show(event: LogEvent) -> dict[str, Any]:
    return {"timestamp": event.at, "message": event.message, "ingestionTime": event.at}


def _any(event: LogEvent) -> bool:
    return True


def _within(values: Values) -> Callable[[LogEvent], bool]:
    """Return whether an event is in the request's time range."""
    first, last = values.get("startTime", 0), values.get("endTime")
    return lambda event: event.at >= first and (last is None or event.at < last)


def _read_place(token: str | None) -> tuple[str, int | None]:
    """Return the direction and the offset of a token. Raises RequestInvalid."""
    if token is None:
        return "", None
    direction, _, offset = token.partition("/")
    if direction not in ("f", "b") or not offset.isdecimal() or len(offset) > 18:
        raise RequestInvalid("nextToken is not valid: use nextForwardToken or nextBackwardToken of an answer.")
    return direction, int(offset)


def _read_places(token: str | None) -> dict[str, int]:
    """Return the offset in each stream from a token. Raises RequestInvalid."""
    if token is None:
        return {}
    places = read_token(token)
    if not isinstance(places, dict) or not all(type(each) is int and 0 <= each < 1 << 60 for each in places.values()):
        raise RequestInvalid(_BAD_TOKEN)
    return places


def _read_pattern(text: str) -> Callable[[str], bool]:
    """Return whether a message has all plain terms of a filter pattern, one of those with `?`, none of those with `-`.

    Raises RequestInvalid for patterns of JSON or of space-delimited fields.
    """
    if text.lstrip().startswith(("{", "[", "%")):
        raise RequestInvalid("filterPattern has terms here: words and quoted phrases, with ? or - before them.")
    terms = [(match["sign"], match["phrase"] or match["word"] or "") for match in _TERM.finditer(text)]
    required, options, excluded = ([term for sign, term in terms if sign == wanted] for wanted in ("", "?", "-"))
    return lambda message: (
        all(term in message for term in required)
        and (not options or any(term in message for term in options))
        and not any(term in message for term in excluded)
    )


def _after(names: list[str], token: str | None) -> list[str]:
    """Return the names after the one that a token is. Raises RequestInvalid."""
    if token is None:
        return names
    if token not in names:
        raise RequestInvalid(_BAD_TOKEN)
    return names[names.index(token) + 1 :]
