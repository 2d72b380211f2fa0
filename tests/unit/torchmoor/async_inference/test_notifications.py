"""Notifications: SageMaker's message, sent to SNS as played by moto, and to webhooks on a real listener."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from aiohttp import web
from standardwebhooks import Webhook as Receiver

from tests.servers import free_ports, wait_for_server
from tests.unit.torchmoor.async_inference.rig import until
from tests.unit.torchmoor.movable_loop import MovableLoop, pass_time
from torchmoor import __version__
from torchmoor.async_inference.notifications.notification import Notification
from torchmoor.async_inference.notifications.notifier import ERROR, SUCCESS, Notifier
from torchmoor.async_inference.request import AsyncOutcome, AsyncRequest, AsyncState
from torchmoor.config.async_inference import AsyncEndpointSettings
from torchmoor.config.notices import NotificationSettings, Webhook
from torchmoor.errors import ConfigError

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
LOOPBACK = ("127.0.0.0/8", "::1/128")
RECEIVED, ENDED = 1_643_150_760.455, 1_643_150_760.6089

REQUEST = AsyncRequest(
    inference_id="id-1",
    endpoint="llava",
    input_location="s3://bucket/in",
    output_location="s3://bucket/out/id-1.out",
    failure_location="s3://bucket/failed/id-1-error.out",
    content_type="text/csv",
    accept="application/json",
    received_at=RECEIVED,
)
SUCCEEDED = Notification(
    REQUEST, AsyncOutcome(state=AsyncState.COMPLETED, content_type="text/csv; charset=utf-8"), ENDED, b"\xffyes"
)
FAILED = Notification(REQUEST, AsyncOutcome(state=AsyncState.FAILED, reason="the model said no"), ENDED, b"no")

COMMON = {
    "awsRegion": "eu-west-1",
    "eventTime": "2022-01-25T22:46:00.608Z",
    "receivedTime": "2022-01-25T22:46:00.455Z",
    "requestParameters": {
        "accept": "application/json",
        "contentType": "text/csv",
        "endpointName": "llava",
        "inputLocation": "s3://bucket/in",
    },
    "inferenceId": "id-1",
    "eventVersion": "1.0",
    "eventSource": "aws:sagemaker",
    "eventName": "InferenceResult",
}


def test_a_success_is_told_in_sagemakers_words() -> None:
    """A success notification has SageMaker's fields."""
    assert SUCCEEDED.message("eu-west-1", includes_response=False) == {
        **COMMON,
        "invocationStatus": "Completed",
        "responseParameters": {"contentType": "text/csv; charset=utf-8", "outputLocation": "s3://bucket/out/id-1.out"},
    }


def test_a_failure_is_told_with_its_reason_and_location() -> None:
    """A failure notification has SageMaker's fields, with the reason and the location."""
    assert FAILED.message("eu-west-1", includes_response=False) == {
        **COMMON,
        "invocationStatus": "Failed",
        "responseParameters": {"failureLocation": "s3://bucket/failed/id-1-error.out"},
        "failureReason": "the model said no",
        "failureLocation": "s3://bucket/failed/id-1-error.out",
    }


def test_an_inline_input_has_no_location_to_tell() -> None:
    """A notification for an inline input has no location, nor headers that the client did not send."""
    inline = replace(REQUEST, input_location=None, body=b"secret", accept="", content_type="")
    message = Notification(inline, AsyncOutcome(state=AsyncState.COMPLETED), ENDED, None).message(
        "eu-west-1", includes_response=True
    )

    assert message["requestParameters"] == {"endpointName": "llava"}
    assert "responseBody" not in message
    assert "secret" not in repr(inline)


@pytest.mark.parametrize(("size", "is_included"), [(0, True), (128 * 1024, True), (128 * 1024 + 1, False)])
def test_an_answer_is_included_up_to_128_kb(size: int, is_included: bool) -> None:
    """An answer of up to 128 kB is included as base64, whatever its bytes are."""
    message = replace(SUCCEEDED, response=b"\xff" * size).message("eu-west-1", includes_response=True)

    assert ("responseBody" in message) == is_included
    if is_included:
        assert message["responseBody"]["encoding"] == "BASE64"
        assert base64.b64decode(message["responseBody"]["content"]) == b"\xff" * size


def test_a_long_reason_is_cut() -> None:
    """A long reason is shortened to fit SNS's limit; the failure object has all of it."""
    reason = "\N{GRINNING FACE}" * 20_000
    failed = replace(FAILED, outcome=replace(FAILED.outcome, reason=reason), response=reason.encode())

    message = failed.message("eu-west-1", includes_response=True)

    assert reason.startswith(message["failureReason"])
    assert base64.b64decode(message["responseBody"]["content"]) == reason.encode()
    assert len(json.dumps(message)) < 256 * 1024


def test_an_id_for_receivers_is_the_same_for_the_same_request_only() -> None:
    """A notification's id is the same for one request only, so that receivers recognise duplicates."""
    later = replace(SUCCEEDED, request=replace(REQUEST, received_at=1.0))
    named = replace(SUCCEEDED, request=replace(REQUEST, inference_id="a.b c "))
    assert SUCCEEDED.message_id == FAILED.message_id != later.message_id
    assert named.message_id.replace("_", "").isalnum()


@pytest.mark.parametrize(
    "values",
    [
        {"url": "ftp://host/", "secret": SECRET},
        {"url": "https://user:word@host/", "secret": SECRET},
        {"url": "https://host/", "secret": ""},
        {"url": "https://host/", "secret": "whsec_c2hvcnQ="},
        {"url": "https://host/", "secret": "not base64"},
    ],
)
def test_webhooks_must_be_sound(values: dict[str, str]) -> None:
    """A short secret is refused, and the error does not repeat it."""
    with pytest.raises(ConfigError, match="webhook's") as told:
        Webhook(**values)
    assert not values["secret"] or values["secret"] not in str(told.value)
    assert SECRET not in repr(Webhook(url="https://host/", secret=SECRET))


# --- SNS ---


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run moto's server, which plays SNS and SQS."""
    port = free_ports(1)[0]
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)],
            stdout=file,
            stderr=file,
            env=dict(os.environ, MOTO_ALLOW_NONEXISTENT_REGION="false"),
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return requests.get(f"{url}/moto-api/data.json", timeout=5).ok
        except requests.RequestException:
            return False

    try:
        wait_for_server(process, answers, log)
        yield url
    finally:
        process.kill()
        process.wait(timeout=60)


@dataclass
class Mailbox:
    """A topic with a subscribed queue."""

    topic: str
    receive: Callable[[], list[dict[str, Any]]]


@pytest.fixture
def mailbox(moto: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Mailbox:
    for name, value in (
        ("AWS_ENDPOINT_URL_SNS", moto),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
    ):
        monkeypatch.setenv(name, value)
    sns = boto3.client("sns", region_name="eu-west-1", endpoint_url=moto)
    sqs = boto3.client("sqs", region_name="eu-west-1", endpoint_url=moto)
    queue = sqs.create_queue(QueueName=request.node.name[:80].partition("[")[0])["QueueUrl"]
    topic = sns.create_topic(Name=request.node.name.partition("[")[0])["TopicArn"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)

    def receive() -> list[dict[str, Any]]:
        found = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
        return [json.loads(json.loads(message["Body"])["Message"]) for message in found]

    return Mailbox(topic, receive)


def notify(
    notices: list[Notification],
    endpoint: AsyncEndpointSettings,
    sleeps: list[float] | None = None,
    **settings: Any,
) -> list[int]:
    """Return the number of failed deliveries for each notification."""

    async def sleep(seconds: float) -> None:
        if sleeps is not None:
            sleeps.append(seconds)

    async def body() -> list[int]:
        notifier = Notifier(NotificationSettings(**settings), sleep=sleep)
        try:
            return [await notifier.notify(notice, endpoint) for notice in notices]
        finally:
            await notifier.close()

    return asyncio.run(body())


def test_topics_hear_of_successes_and_failures(mailbox: Mailbox) -> None:
    """Success and failure each have their own topic, with the answer where the endpoint requests it."""
    endpoint = AsyncEndpointSettings(
        success_topic=mailbox.topic, error_topic=mailbox.topic, include_response_in=(ERROR,)
    )

    assert notify([SUCCEEDED, FAILED], endpoint) == [0, 0]

    by_status = {message["invocationStatus"]: message for message in mailbox.receive()}
    assert by_status["Completed"] == SUCCEEDED.message("eu-west-1", includes_response=False)
    assert by_status["Failed"] == FAILED.message("eu-west-1", includes_response=True)
    assert base64.b64decode(by_status["Failed"]["responseBody"]["content"]) == b"no"


def test_the_largest_answer_gets_through(mailbox: Mailbox) -> None:
    """The largest answer, 128 kB or 171 kB in base64, fits SNS's limit of 256 kB."""
    endpoint = AsyncEndpointSettings(success_topic=mailbox.topic, include_response_in=(SUCCESS,))

    assert notify([replace(SUCCEEDED, response=b"\xff" * 128 * 1024)], endpoint) == [0]

    (message,) = mailbox.receive()
    assert base64.b64decode(message["responseBody"]["content"]) == b"\xff" * 128 * 1024


def test_an_endpoint_without_topics_tells_nobody(mailbox: Mailbox) -> None:
    """An endpoint without topics sends nothing, and a topic for failures gets no success."""
    assert notify([SUCCEEDED], AsyncEndpointSettings()) == [0]
    assert notify([SUCCEEDED], AsyncEndpointSettings(error_topic=mailbox.topic)) == [0]
    assert mailbox.receive() == []


def test_a_topic_that_is_not_there_is_not_tried_again(mailbox: Mailbox) -> None:
    sleeps: list[float] = []

    assert notify([SUCCEEDED], AsyncEndpointSettings(success_topic=f"{mailbox.topic}-none"), sleeps) == [1]
    assert sleeps == []


def test_sns_that_is_down_is_tried_again(monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox) -> None:
    """Attempts repeat with growing delays and end after the last one."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_SNS", f"http://127.0.0.1:{free_ports(1)[0]}")
    sleeps: list[float] = []

    assert notify(
        [SUCCEEDED], AsyncEndpointSettings(success_topic=mailbox.topic), sleeps, max_attempts=5, max_delay_s=2.0
    ) == [1]

    assert all(limit / 2 <= slept <= limit for slept, limit in zip(sleeps, (0.5, 1, 2, 2), strict=True))


def test_credentials_that_are_found_later_are_used(
    monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, tmp_path: Path
) -> None:
    """A topic hears of a success once credentials are there, as when a metadata service did not answer for a moment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    async def find_credentials(seconds: float) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")

    async def body() -> int:
        notifier = Notifier(NotificationSettings(), sleep=find_credentials)
        try:
            return await notifier.notify(SUCCEEDED, AsyncEndpointSettings(success_topic=mailbox.topic))
        finally:
            await notifier.close()

    assert asyncio.run(body()) == 0
    assert [message["inferenceId"] for message in mailbox.receive()] == ["id-1"]


@dataclass
class Regions:
    """SNS of two regions, of which us-east-1 does not answer before `may_answer`."""

    may_answer: asyncio.Event
    topics: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        topic = str((await request.post())["TopicArn"])
        self.topics.append(topic)
        if "us-east-1" in topic:
            await self.may_answer.wait()
        answer = "<PublishResponse><PublishResult><MessageId>1</MessageId></PublishResult></PublishResponse>"
        return web.Response(text=answer, content_type="text/xml")


async def test_a_region_that_does_not_answer_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """SNS has threads for each region, as it has a server for each."""
    regions = Regions(asyncio.Event())
    silent, quick = (
        AsyncEndpointSettings(success_topic=f"arn:aws:sns:{region}:123456789012:ended")
        for region in ("us-east-1", "eu-west-1")
    )
    async with listening(regions) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SNS", url.partition("/hook")[0])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        notifier = Notifier(NotificationSettings(max_in_flight=1, timeout_s=300))
        waiting = asyncio.create_task(notifier.notify(SUCCEEDED, silent))
        try:
            await until(lambda: len(regions.topics) == 1, "us-east-1 has the message")

            assert await notifier.notify(SUCCEEDED, quick) == 0
        finally:
            regions.may_answer.set()
            assert await waiting == 0
            await notifier.close()


# --- webhooks ---


@dataclass
class Listener:
    """A receiver that verifies with the specification's own library and answers with `statuses`."""

    statuses: list[int] = field(default_factory=list)  # one a request, then 200
    heard: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    silence_s: float = 0.0  # time that passes after each request, which then gets no answer
    may_answer: asyncio.Event | None = None  # awaited before an answer

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.ids.append(request.headers["webhook-id"])
        self.agents.append(request.headers["User-Agent"])
        if self.silence_s:
            await pass_time(self.silence_s)
            await asyncio.Event().wait()
        if self.may_answer is not None:
            await self.may_answer.wait()
        if self.statuses:
            return web.Response(status=self.statuses.pop(0), headers={"Location": "/elsewhere"})
        self.heard.append(Receiver(SECRET).verify(body, dict(request.headers)))
        return web.Response(status=204)


@asynccontextmanager
async def listening(listener: Listener | Regions) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", listener.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook?tenant=1"
    finally:
        await runner.cleanup()


def call_webhook(listener: Listener, notice: Notification = SUCCEEDED, **settings: Any) -> tuple[int, list[float]]:
    """Return the number of failed deliveries and the delays between attempts."""
    sleeps: list[float] = []

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async def body() -> int:
        async with listening(listener) as url:
            values = {"private_networks": LOOPBACK, "webhooks": (Webhook(url=url, secret=SECRET),), **settings}
            notifier = Notifier(NotificationSettings(**values), sleep=sleep)
            try:
                return await notifier.notify(notice, AsyncEndpointSettings(include_response_in=(SUCCESS,)))
            finally:
                await notifier.close()

    with asyncio.Runner(loop_factory=MovableLoop) as runner:
        return runner.run(body()), sleeps


def test_a_webhook_gets_a_signed_message() -> None:
    """The specification's library verifies the message's signature; region and version are those of the server."""
    listener = Listener()

    assert call_webhook(listener, aws_region="eu-west-1") == (0, [])
    assert listener.heard == [SUCCEEDED.message("eu-west-1", includes_response=True)]
    assert listener.agents == [f"torchmoor/{__version__}"]


def test_a_webhook_that_fails_is_tried_again_with_the_same_id() -> None:
    """A failing webhook is called again with the same id until it accepts the message."""
    listener = Listener(statuses=[500, 429, 503])

    num_untold, sleeps = call_webhook(listener)

    assert (num_untold, len(sleeps), len(listener.heard)) == (0, 3, 1)
    assert listener.ids == [SUCCEEDED.message_id] * 4


def test_a_webhook_that_goes_on_failing_is_given_up() -> None:
    """Calls of a failing webhook end after the configured number of tries."""
    listener = Listener(statuses=[500] * 9)

    num_untold, sleeps = call_webhook(listener, max_attempts=3)

    assert (num_untold, len(sleeps), len(listener.ids)) == (1, 2, 3)


@asynccontextmanager
async def notifying(
    *urls: str, sleep: Callable[[float], Awaitable[None]] | None = None, **settings: Any
) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Yield a function that notifies the webhooks of a success, and returns the number of failed deliveries."""
    hooks = tuple(Webhook(url=url, secret=SECRET) for url in urls)
    notifier = Notifier(
        NotificationSettings(private_networks=LOOPBACK, webhooks=hooks, max_attempts=3, timeout_s=300, **settings),
        sleep=sleep or no_wait,
    )
    try:
        yield lambda: notifier.notify(SUCCEEDED, AsyncEndpointSettings())
    finally:
        await notifier.close()


async def no_wait(seconds: float) -> None:
    pass


async def test_a_webhook_that_is_down_is_tried_again_for_each_notification() -> None:
    """It may be back before the last attempt, and other requests do not wait for a notification with its own turn."""
    listener, counts = Listener(statuses=[500] * 8), []
    async with listening(listener) as url, notifying(url) as notify_all:
        for _ in range(3):
            counts.append((await notify_all(), len(listener.ids)))

    assert counts == [(1, 3), (1, 6), (0, 9)]


async def test_a_notification_keeps_its_attempts_when_its_webhook_counts_as_down() -> None:
    """The last attempt of an earlier notification does not end the later ones that are between their attempts."""
    listener, sleeping, may_continue = Listener(statuses=[500] * 3), asyncio.Event(), asyncio.Event()

    async def sleep_first(seconds: float) -> None:
        if not sleeping.is_set():
            sleeping.set()
            await may_continue.wait()

    async with listening(listener) as url, notifying(url, sleep=sleep_first) as notify_all:
        first = asyncio.create_task(notify_all())
        await sleeping.wait()
        listener.statuses = [500] * 4
        second = await notify_all()
        may_continue.set()
        assert (second, await first) == (1, 0)

    assert len(listener.ids) == 1 + 3 + 2


async def test_a_webhook_is_down_after_the_tries_of_one_notification_however_many_wait() -> None:
    """A notification's tries are not queued behind those of others; each of the others is then tried once."""
    listener = Listener(statuses=[500] * 99)
    async with listening(listener) as url, notifying(url, max_in_flight=1) as notify_all:
        num_failed = sum(await asyncio.gather(*(notify_all() for _ in range(4))))

    assert num_failed == 4
    assert len(listener.ids) == 3 + 3


async def test_a_webhook_that_is_down_and_busy_gets_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Further notifications fail at once while as many deliveries as are allowed wait for its answer."""
    listener = Listener(statuses=[500] * 3)
    async with listening(listener) as url, notifying(url, max_in_flight=1) as notify_all:
        assert await notify_all() == 1
        listener.may_answer = asyncio.Event()
        waiting = asyncio.create_task(notify_all())
        await until(lambda: len(listener.ids) == 4, "it waits for an answer")
        caplog.clear()
        assert await notify_all() == 1
        assert "error=127.0.0.1 is down, " in caplog.text
        listener.may_answer.set()
        assert await waiting == 0

    assert len(listener.ids) == 4


async def test_a_webhook_that_does_not_answer_delays_no_other() -> None:
    """Each receiver has deliveries of its own, however many are allowed at a time."""
    may_answer = asyncio.Event()
    silent, quick = Listener(may_answer=may_answer), Listener()
    async with (
        listening(silent) as first,
        listening(quick) as second,
        notifying(first, second, max_in_flight=1) as notify_all,
    ):
        both = asyncio.create_task(notify_all())
        await until(lambda: bool(silent.ids and quick.heard), "both have the message")
        may_answer.set()
        assert await both == 0


async def test_a_webhook_by_name_needs_none_of_the_loops_own_threads() -> None:
    """Other parts use them, and a name server that does not answer would occupy them."""
    loop, listener = asyncio.get_running_loop(), Listener()
    occupied = ThreadPoolExecutor(1)
    occupied.shutdown()
    async with listening(listener) as url, notifying(url.replace("127.0.0.1", "localhost")) as notify_all:
        loop.set_default_executor(occupied)
        num_failed = await notify_all()
        loop.set_default_executor(ThreadPoolExecutor(1))

    assert (num_failed, len(listener.heard)) == (0, 1)


async def test_a_name_server_that_does_not_answer_holds_up_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can interrupt a look-up, and instances are stopped only after the proxy."""
    is_asked, may_answer = threading.Event(), threading.Event()

    def look_up(*arguments: object, **more: object) -> list[object]:
        is_asked.set()
        may_answer.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with notifying("https://hook.example/") as notify_all:
        waiting = asyncio.create_task(notify_all())
        await until(is_asked.is_set, "the name server is asked")
        waiting.cancel()

    may_answer.set()  # only now


@pytest.mark.parametrize("status", [302, 400, 401, 410])
def test_a_webhook_that_refuses_is_not_tried_again(status: int) -> None:
    listener = Listener(statuses=[status])

    assert call_webhook(listener) == (1, [])
    assert (len(listener.ids), listener.heard) == (1, [])


def test_a_webhook_that_never_answers_costs_the_time_out() -> None:
    """A webhook that does not answer is called again after the time-out."""
    listener = Listener(silence_s=301)

    num_untold, sleeps = call_webhook(listener, timeout_s=300, max_attempts=2)

    assert (num_untold, len(sleeps), len(listener.ids)) == (1, 1, 2)


def test_a_webhook_inside_is_refused_unless_an_operator_allows_it() -> None:
    """A webhook on a private address or name, or over plain http, is refused unless an operator allows it."""
    listener = Listener()

    assert call_webhook(listener, private_networks=()) == (1, [])
    assert listener.ids == []
    webhook = Webhook(url="https://hook.example/", secret=SECRET)
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["169.254.169.254"]

    async def body() -> int:
        notifier = Notifier(NotificationSettings(webhooks=(webhook,)), resolver=resolve)
        try:
            return await notifier.notify(SUCCEEDED, AsyncEndpointSettings())
        finally:
            await notifier.close()

    assert asyncio.run(body()) == 1
    assert asked == ["hook.example"]


def test_each_destination_is_counted_by_itself(mailbox: Mailbox) -> None:
    """A failing destination does not affect the delivery to others, and each is counted separately."""
    listener = Listener()

    async def sleep(seconds: float) -> None: ...

    async def body() -> int:
        async with listening(listener) as url:
            down = f"http://127.0.0.1:{free_ports(1)[0]}/"
            hooks = tuple(Webhook(url=one, secret=SECRET) for one in (down, url))
            notifier = Notifier(NotificationSettings(webhooks=hooks, private_networks=LOOPBACK), sleep=sleep)
            try:
                return await notifier.notify(SUCCEEDED, AsyncEndpointSettings(success_topic=mailbox.topic))
            finally:
                await notifier.close()

    assert asyncio.run(body()) == 1
    assert len(listener.heard) == len(mailbox.receive()) == 1
