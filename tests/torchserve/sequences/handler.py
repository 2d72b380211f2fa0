"""Serve as a third-party handler with TorchServe's sequenceBatching: counters in memory, one per session.

Bodies: {"type": "start_session"}, {"type": "add", "number": 2}, {"type": "close_session"}, {"type": "seen"}. It keeps
the type of every request that reaches it; one of an unknown type is an error, as is a turn of a session that was not
started here.
"""

import datetime
import json


class Counters:
    """The handler's class, which TorchServe finds by its initialize and handle."""

    def initialize(self, context):
        self.minutes = context.model_yaml_config["handler"]["sessionExpiryInMinutes"]
        self.totals = {}
        self.seen = []

    def handle(self, rows, context):
        context.stopping_criteria = [lambda _: None] * len(rows)
        return [self.answer(row, index, context) for index, row in enumerate(rows)]

    def answer(self, row, index, context):
        body = row.get("data") or row.get("body")
        request = json.loads(body) if isinstance(body, bytes | bytearray | str) else body
        kind, session = request.get("type"), context.get_sequence_id(index)
        self.seen.append(kind)
        context.set_response_header(index, context.header_key_sequence_id, session)
        if context.get_request_header(index, context.header_key_sequence_start):
            self.totals[session] = 0
        if kind == "start_session":
            end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=self.minutes)
            stamp = f"{session}; Expires={end:%Y-%m-%dT%H:%M:%SZ}"
            context.set_response_header(index, context.header_key_sequence_id, stamp)
            return json.dumps({"session_id": session})
        if session not in self.totals:
            context.set_response_status(424, "", index)
            return json.dumps({"message": f"no session {session} was started here"})
        if kind == "add":
            self.totals[session] += request["number"]
            return json.dumps({"total": self.totals[session]})
        if kind == "seen":
            return json.dumps({"seen": self.seen})
        if kind == "close_session":
            del self.totals[session]
            context.set_response_header(index, context.header_key_sequence_end, session)
            return json.dumps({"success": True})
        context.set_response_status(400, "", index)
        return json.dumps({"message": f"unknown type {kind!r}"})
