"""Responses in the background whose request comes twice."""

from contextlib import closing
from io import BytesIO
from typing import Any

from PIL import Image

from tests.unit.handlers.test_chat_cancel import PATIENT, SilentServer
from torchmoor.wire import headers as wire

RETRIED = {wire.RESOURCE: "POST responses", wire.INVOCATION_ID: "one-id"}


def test_a_retry_during_the_fetch_of_an_image_queues_nothing_more(make_client: Any, red: Image.Image) -> None:
    """The request and its retry have the same response, which was queued once and has the image once."""
    picture = BytesIO()
    red.save(picture, "PNG")
    data = picture.getvalue()
    client = make_client(intake={**PATIENT, "fetch_threads": 4})
    with closing(SilentServer()) as server:
        image = {"type": "input_image", "image_url": server.url}
        body = {"model": "llava", "background": True, "input": [{"role": "user", "content": [image]}]}
        sent = [client.send(body, RETRIED) for _ in range(2)]
        connections = [server.accept() for _ in sent]
        for connection in connections:
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
                connection.recv(1)

    first, second = (each.wait().json for each in sent)

    assert first == second
    assert first["status"] == "queued"
    items = client.call({}, {wire.RESOURCE: f"GET responses/{first['id']}/input_items"}).json["data"]
    assert [part["type"] for item in items for part in item["content"]] == ["input_image"]
    (session,) = client.service.store.snapshot()
    assert len(session.pending_images) == 1
