"""A whole model for torchmoor in one file: a TorchServe handler whose sessions hold notes that a client adds and finds.

It imports nothing of this project. docs/own-model.md packages it, serves it and sends it requests.
"""

import json
import secrets
import time
from datetime import UTC, datetime

TTL_S = 600
MAX_SESSIONS = 1000
MAX_NOTES = 1000  # of a session


class NotebookHandler:
    """TorchServe makes one object in each worker, and calls `initialize` once, then `handle` for every batch."""

    def initialize(self, context):
        """Load a model here, from context.system_properties["model_dir"]; put state on `self`, never on the context."""
        self.sessions = {}  # id -> (end, notes)

    def handle(self, rows, context):
        """Return one answer for each row. An exception that escapes would fail all of them."""
        return [self.answer(row, number, context) for number, row in enumerate(rows)]

    def answer(self, row, number, context):
        """Answer a request of the type start_session, add (with "note"), find (with "word") or close_session."""
        context.set_response_content_type(number, "application/json")
        try:
            body = row.get("body") or row.get("data")
            request = body if isinstance(body, dict) else json.loads(bytes(body))
            headers = {name.lower(): text for name, text in context.get_all_request_header(number).items()}
            session = headers.get("x-amzn-sagemaker-session-id")
            if request["type"] == "start_session":
                return self.open(number, context)
            ends_at, notes = self.sessions.get(session, (0, []))
            if ends_at < time.time():
                self.sessions.pop(session, None)
                raise ValueError("no such session, or it has expired")
            if request["type"] == "add":
                if len(notes) >= MAX_NOTES:
                    raise ValueError(f"this session has {MAX_NOTES} notes, the most that it may have")
                notes.append(str(request["note"]))
                return json.dumps({"notes": len(notes)})
            if request["type"] == "find":
                return json.dumps({"found": [note for note in notes if request["word"] in note]})
            if request["type"] == "close_session":
                del self.sessions[session]
                context.set_response_header(number, "X-Amzn-SageMaker-Closed-Session-Id", session)
                return json.dumps({"success": True})
            raise ValueError(f"there is no type {request['type']!r}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            context.set_response_status(400, "Bad Request", number)
            message = f"the field {error} is missing" if isinstance(error, KeyError) else f"{error}"
            return json.dumps({"error": {"code": "BadRequest", "message": message}})

    def open(self, number, context):
        """Put the session's id and its end into one header; the proxy remembers which instance sent it."""
        if len(self.sessions) >= MAX_SESSIONS:  # this includes sessions that have expired
            now = time.time()
            self.sessions = {each: kept for each, kept in self.sessions.items() if kept[0] >= now}
        if len(self.sessions) >= MAX_SESSIONS:
            context.set_response_status(503, "Service Unavailable", number)
            return json.dumps({"error": {"code": "Overloaded", "message": "too many sessions are open"}})
        session, ends_at = f"notes-{secrets.token_hex(16)}", time.time() + TTL_S
        self.sessions[session] = (ends_at, [])
        until = datetime.fromtimestamp(ends_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        context.set_response_header(number, "X-Amzn-SageMaker-Session-Id", f"{session}; Expires={until}")
        return json.dumps({"session_id": session})
