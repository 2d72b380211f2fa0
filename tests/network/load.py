"""Run clients as a process: users who take turns in sessions, and as many who request streams.

    python -m tests.network.load URL USERS

Each line on standard input is answered with one line of JSON, the totals so far. The users stop at end of file.

A session is lost if a turn is refused with a 4xx, or if it has fewer turns recorded than were acknowledged.
"""

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp

TURNS = 12  # of a session
THINK_S = 0.05
TIMEOUT_S = 60.0
SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"


@dataclass
class Report:
    """answered: turns and streams. by: turns by instance. failed, broken, lost: descriptions."""

    answered: int = 0
    sessions: int = 0
    by: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


class User:
    def __init__(self, client: aiohttp.ClientSession, url: str, report: Report) -> None:
        self._client = client
        self._url = url
        self._report = report

    async def run(self, *, is_streaming: bool) -> None:
        try:
            while True:
                if is_streaming:
                    await self._stream()
                    continue
                session = await self._open()
                if session is not None:
                    self._report.sessions += 1
                    await self._talk(session)
        except Exception as error:  # an unexpected response
            self._report.failed.append(repr(error))

    async def _ask(self, session: str) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request; status 0 means that no response came."""
        try:
            async with self._client.post(
                f"{self._url}/endpoints/llava/invocations", data=b"{}", headers={SESSION_ID: session}
            ) as answer:
                return answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return 0, {}, repr(error).encode()
        finally:
            await asyncio.sleep(THINK_S)

    async def _open(self) -> str | None:
        status, headers, body = await self._ask("NEW_SESSION")
        if status == 200:
            self._report.answered += 1
            return headers[NEW_SESSION_ID].partition(";")[0]
        self._report.failed.append(f"opening: {status} {body[:200]!r}")
        return None

    async def _talk(self, session: str) -> None:
        acknowledged = asked = 0
        while acknowledged < TURNS:
            asked += 1
            status, _, body = await self._ask(session)
            if status == 200:
                said = json.loads(body)
                if not acknowledged < said["turns"] <= asked:
                    self._report.lost.append(f"{said} after {acknowledged} of {asked}")
                    return
                acknowledged = said["turns"]
                self._report.answered += 1
                self._report.by[said["instance"]] += 1
            elif 400 <= status < 500 and status != 429:
                self._report.lost.append(f"{status} {body[:200]!r}")
                return
            else:
                self._report.failed.append(f"turn: {status} {body[:200]!r}")

    async def _stream(self) -> None:
        try:
            async with self._client.post(
                f"{self._url}/endpoints/llava/invocations-response-stream", data=b'{"stream": 1}'
            ) as answer:
                body = await answer.read()
                if answer.status != 200:
                    self._report.failed.append(f"stream: {answer.status} {body[:200]!r}")
                elif b"the-end" in body:
                    self._report.answered += 1
                else:
                    self._report.broken.append(repr(body[-200:]))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._report.failed.append(f"stream: {error!r}")
        finally:
            await asyncio.sleep(THINK_S)


async def main(url: str, num_users: int) -> None:
    report, loop, ended = Report(), asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        print(json.dumps(vars(report)), flush=True)

    def read() -> None:
        for _ in sys.stdin:
            loop.call_soon_threadsafe(tell)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        users = [
            asyncio.create_task(User(client, url, report).run(is_streaming=number % 2 == 1))
            for number in range(num_users)
        ]
        await ended.wait()
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
