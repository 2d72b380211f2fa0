"""Responses in the background: requests about a response that the proxy's queue sends to an instance.

A handler stores such a response in a session, and names it in the answer's header BACKGROUND. The proxy queues it
before the client gets the answer. The queue's worker sends RUN, which generates the response, until one succeeds. If
the response will not be generated, it sends END. Both replace the method in a request for the resource.
"""

from __future__ import annotations

RUN, END = "RUN", "END"

# Keys of END's body, and values of its status
STATUS = "status"
MESSAGE = "message"
CODE = "code"  # of the handler's error, if it has refused the request
FAILED, CANCELLED = "failed", "cancelled"


def run_resource(response_id: str) -> str:
    return f"{RUN} responses/{response_id}"


def end_resource(response_id: str) -> str:
    return f"{END} responses/{response_id}"
