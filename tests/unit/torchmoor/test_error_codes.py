"""The error codes that the JavaScript code repeats."""

import re
from importlib.resources import files

from torchmoor.proxy.api import chat_page
from torchmoor.wire.error_codes import STREAM_BROKEN


def test_the_chat_page_knows_a_broken_streams_code() -> None:
    script = files(chat_page).joinpath("session.js").read_text(encoding="utf-8")
    assert re.findall(r'AnswerBroken && error\.code === "(\w+)"', script) == [STREAM_BROKEN]
