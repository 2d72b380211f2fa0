"""Bodies that open an OpenAI conversation or add items to one."""

import json
from typing import Any

from handlers.chat.commands import AddItems, Command, OpenSession
from handlers.chat.dialects.responses import missing_field, read_metadata, resolve, unknown_field
from handlers.chat.dialects.turns import check_session_limit
from handlers.chat.identity import identify
from handlers.chat.items import Referred, check_results, find_references, parse_input
from handlers.requests.incoming import Incoming

MAX_ADDED_ITEMS = 20  # by one request: OpenAI's limit


def parse_conversation(incoming: Incoming, body: dict[str, Any], now: float) -> Command:
    """Read a body that opens a conversation."""
    refuse_other_fields(body, {"items", "metadata"})
    check_session_limit(incoming)
    metadata = read_metadata(body)
    opening = OpenSession(
        caller=incoming.caller,
        invocation_id=incoming.invocation_id,
        question=identify(body.get("items"), metadata),
        resource=json.dumps({"object": "conversation", "created_at": int(now), "metadata": metadata}),
    )

    def resume(referred: Referred) -> AddItems:
        items = parse_input(body.get("items") or [], MAX_ADDED_ITEMS, "items", referred)
        check_results(items, (), "items")
        return AddItems(
            caller=incoming.caller,
            conversation_id="",
            items=items,
            invocation_id=incoming.invocation_id,
            opening=opening,
        )

    return resolve(incoming, find_references(body.get("items"), MAX_ADDED_ITEMS, "items"), resume)


def parse_items(incoming: Incoming, conversation_id: str, body: dict[str, Any]) -> Command:
    """Read a body that adds items to a conversation."""
    refuse_other_fields(body, {"items", "include"})
    if not body.get("items"):
        raise missing_field("items")

    def resume(referred: Referred) -> AddItems:
        items = parse_input(body["items"], MAX_ADDED_ITEMS, "items", referred)
        return AddItems(
            caller=incoming.caller, conversation_id=conversation_id, items=items, invocation_id=incoming.invocation_id
        )

    return resolve(incoming, find_references(body["items"], MAX_ADDED_ITEMS, "items"), resume)


def refuse_other_fields(body: dict[str, Any], known: set[str]) -> None:
    unknown = {name for name, value in body.items() if value is not None} - known
    if unknown:
        raise unknown_field(min(unknown))
