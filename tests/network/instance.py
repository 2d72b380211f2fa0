"""Run a fake instance as a process; all of them share a journal of sessions.

    python -m tests.network.instance NAME PORT JOURNAL

A session is a file with one line per turn: its invocation id. A repeated turn adds no line, as in the handlers'
journals. The response states the number of turns and the instance.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

from tests.proxy.fake_instance import FakeInstance, Received, Wire, answering
from torchmoor.wire.session_ids import mint as mint_id

KEY = b"a key of the tests of networks"
TURN_S = 0.03
STREAM_PIECES = 30  # so that a request is always in progress


async def main(name: str, port: int, journal: Path) -> None:
    async def behave(request: Received, wire: Wire) -> None:
        session = request.headers.get("x-amzn-sagemaker-session-id", "")
        if b"stream" in request.body:
            await stream(wire)
            return
        await asyncio.sleep(TURN_S)
        headers = {}
        if session == "NEW_SESSION":
            session = headers["X-Amzn-SageMaker-New-Session-Id"] = mint(name)
            (journal / session).touch()
        file = journal / session
        if not session or not file.exists():
            await wire.answer(404 if session else 200, body=json.dumps({"instance": name, "turns": 0}).encode())
            return
        turns = file.read_text().splitlines()
        invocation = request.headers["amz-sdk-invocation-id"]
        if not headers and invocation not in turns:
            with file.open("a") as lines:
                lines.write(invocation + "\n")
            turns.append(invocation)
        await wire.answer(headers=headers, body=json.dumps({"instance": name, "turns": len(turns)}).encode())

    status = json.dumps({"instance": name, "sessions": {"open": 0, "max": 1000}}).encode()
    fake = FakeInstance(name, behave=behave, on_status=answering(body=status), host=None, port=port)
    await fake.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    await fake.stop()


def mint(name: str) -> str:
    """Generate a session id as the handler of that instance does."""
    return mint_id({"k1": KEY}, instance=name, expires_at=0x7FFFFFFF, endpoint="llava").text


async def stream(wire: Wire) -> None:
    await wire.begin_stream("text/plain; charset=utf-8")
    for _ in range(STREAM_PIECES):
        await wire.chunk(b"piece ")
        await asyncio.sleep(TURN_S)
    await wire.chunk(b"the-end")
    await wire.chunk(b"")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
