"""Answers of a service, in tests of many models."""

from handlers.requests.reply import PendingReply, WholeReply
from tests.waiting import wait_until


def whole(reply: PendingReply) -> WholeReply:
    wait_until(reply.has_news, "there is an answer")
    return reply.take(1 << 30)
