"""An event loop whose time a test can move forward. Asynchronous tests run on one (see conftest.py)."""

import asyncio


class MovableLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test can move forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


async def pass_time(seconds: float) -> None:
    """Make every timer due that ends within `seconds`, and run the timers' callbacks."""
    loop = asyncio.get_running_loop()
    loop.ahead_s += seconds
    for _ in range(3):
        await asyncio.sleep(0)
