"""Provide the suite with an image, because its own is on the Internet."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest


@pytest.fixture(autouse=True)
def picture(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = Mock(content=Path(os.environ["PICTURE"]).read_bytes())
    monkeypatch.setattr("langchain_tests.integration_tests.chat_models.httpx.get", lambda *given, **options: fetched)
