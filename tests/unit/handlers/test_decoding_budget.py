"""The memory of images in decoding: its budget, its peak, and its return to the system."""

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from handlers.chat.images.decoding_budget import DecodingBudget
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.store import ImageStore
from handlers.errors import ClientGone, ImageTooLarge, NotAnImage, OutOfMemory
from handlers.settings.intake import IntakeSettings
from handlers.worker.counters import Counters
from tests.torchserve.drawings import encoded
from tests.unit.handlers.conftest import FakeClock
from tests.waiting import PROGRAM_S, wait_until

MB = 1_000_000
ROTATED = Pillow.Exif()
ROTATED[0x0112] = 6  # turn 90 degrees clockwise


def go_on() -> None:
    """Run the event loop, so that an image that can wait does."""


def png(side: int, mode: str = "RGBA") -> bytes:
    return encoded(Pillow.new(mode, (side, side), "red"))


def in_thread(action: Callable[[], object], caught: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            action()
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# The budget


def test_a_share_is_returned_on_success_and_error() -> None:
    budget = DecodingBudget(100, max_wait_s=60)

    with budget.lease(60, go_on), budget.lease(40, go_on):
        assert budget.used_bytes == 100
    with pytest.raises(ZeroDivisionError), budget.lease(60, go_on):
        raise ZeroDivisionError

    assert budget.used_bytes == 0


def test_an_image_that_never_fits_is_refused_at_once() -> None:
    """Waiting would not help, so the image is too large; the budget stays free."""
    budget = DecodingBudget(100, max_wait_s=60)

    reason = "takes 101 bytes of memory to decode, more than 100"
    with pytest.raises(ImageTooLarge, match=reason), budget.lease(101, go_on):
        raise AssertionError

    assert budget.used_bytes == 0


def test_an_image_waits_for_its_share_to_the_deadline(clock: FakeClock) -> None:
    """An image that gets no share by its deadline is refused, may be sent again, and leaves its place in the queue."""
    budget = DecodingBudget(100, max_wait_s=60, clock=clock)

    with (
        budget.lease(60, go_on),
        pytest.raises(OutOfMemory, match="in use; try again later") as caught,
        budget.lease(60, lambda: clock.advance(61)),
    ):
        raise AssertionError

    assert (caught.value.status, caught.value.retry_after_s) == (507, 1)
    assert repr(budget) == "<DecodingBudget 0 of 100 bytes, 0 waiting>"


def test_a_cancelled_request_stops_waiting() -> None:
    """A client that left takes no share, and the next image gets it."""
    budget = DecodingBudget(100, max_wait_s=60)

    def leave() -> None:
        raise ClientGone("left")

    with budget.lease(60, go_on), pytest.raises(ClientGone), budget.lease(60, leave):
        raise AssertionError

    with budget.lease(100, go_on):
        assert budget.used_bytes == 100


def test_images_are_decoded_in_the_order_of_arrival() -> None:
    """A small image waits behind a large one even if it would fit, and follows together with others."""
    budget = DecodingBudget(100, max_wait_s=60)
    order: list[int] = []
    failures: list[BaseException] = []
    together = threading.Barrier(2)

    def use(num_bytes: int) -> None:
        with budget.lease(num_bytes, go_on):
            order.append(num_bytes)
            if num_bytes < 90:
                together.wait(60)

    with budget.lease(20, go_on):
        threads = []
        for waiting, num_bytes in enumerate((90, 11, 12), 1):
            threads.append(in_thread(lambda size=num_bytes: use(size), failures))
            wait_until(lambda count=waiting: f"{count} waiting" in repr(budget), "it waits")
    for thread in threads:
        thread.join(60)

    assert failures == []
    assert order[0] == 90
    assert sorted(order) == [11, 12, 90]
    assert budget.used_bytes == 0


def test_a_request_that_holds_a_share_does_not_wait_behind_those_that_wait_for_it() -> None:
    """Its next image is decoded before a larger one that arrived earlier."""
    budget = DecodingBudget(100, max_wait_s=60)
    failures: list[BaseException] = []

    def use() -> None:
        with budget.lease(60, go_on):
            pass

    budget.take(50, go_on, is_held=True)
    waiting = in_thread(use, failures)
    wait_until(lambda: "1 waiting" in repr(budget), "the large one waits")
    with budget.lease(40, go_on, held_bytes=50):
        assert budget.used_bytes == 90
    budget.release(50, is_held=True)
    waiting.join(60)

    assert (failures, budget.used_bytes) == ([], 0)


def test_held_shares_leave_half_of_the_budget_unless_there_is_only_one(clock: FakeClock) -> None:
    """So the requests that hold them can decode further images, and end."""
    budget = DecodingBudget(100, max_wait_s=60, clock=clock)

    budget.take(70, go_on, is_held=True)
    with pytest.raises(OutOfMemory):
        budget.take(10, lambda: clock.advance(61), is_held=True)
    budget.release(70, is_held=True)
    budget.take(30, go_on, is_held=True)
    budget.take(20, go_on, is_held=True)

    assert budget.used_bytes == 50


def test_held_shares_leave_room_for_the_largest_image(clock: FakeClock) -> None:
    """Otherwise two requests whose images take more than half of the budget would wait for each other's shares."""
    budget = DecodingBudget(100, max_wait_s=60, clock=clock)

    with budget.lease(70, go_on):
        pass
    budget.take(20, go_on, is_held=True)
    with pytest.raises(OutOfMemory):
        budget.take(20, lambda: clock.advance(61), is_held=True)
    budget.take(10, go_on, is_held=True)
    with budget.lease(70, go_on, held_bytes=10):
        assert budget.used_bytes == 100


# Its users


def test_an_image_counts_until_its_features_are_computed() -> None:
    """The loader counts 14 bytes per pixel, 18 for WebP, up to the end of the block, and nothing afterwards."""
    loader = ImageLoader(IntakeSettings())

    for data, num_bytes in ((png(10), 1400), (encoded(Pillow.new("RGB", (10, 10)), "WEBP"), 1800)):
        with loader.decoded(data, go_on) as picture:
            assert loader.decoding.used_bytes == num_bytes
        assert loader.decoding.used_bytes == 0
        with pytest.raises(ValueError, match="closed"):
            picture.getpixel((0, 0))
    with pytest.raises(NotAnImage), loader.decoded(png(500)[:-300], go_on):
        raise AssertionError
    assert loader.decoding.describe() == {"bytes": 0, "capacity_bytes": 2 << 30}


def test_an_image_larger_than_the_budget_is_refused() -> None:
    """An image within max_pixels that the worker's budget can never hold gets the error of a large image."""
    loader = ImageLoader(IntakeSettings(decoding_bytes=1399))

    with pytest.raises(ImageTooLarge), loader.decoded(png(10), go_on):
        raise AssertionError


def test_the_same_image_does_not_wait_for_itself() -> None:
    """A request that computes features again does not deadlock with one that holds the same image's memory."""
    loader = ImageLoader(IntakeSettings(decoding_bytes=2000))  # for one image of 100 pixels
    store = ImageStore(64, 1 << 20, False, loader.decoded, lambda picture: torch.zeros(2, 8), Counters())
    same = encoded(Pillow.open(io.BytesIO(png(10))), compress_level=0)
    image = store.take_in("a", png(10))
    store.take_in("b", png(10))  # takes the memory of the first one's features
    failures: list[BaseException] = []

    with loader.decoding.lease(2000, go_on):
        taking = in_thread(lambda: store.take_in("a", same), failures)
        wait_until(lambda: "1 waiting" in repr(loader.decoding), "the second encoding waits")
        pinning = in_thread(lambda: store.pin(image, bytes), failures)
        wait_until(lambda: "2 waiting" in repr(loader.decoding), "the turn waits")
    taking.join(60)
    pinning.join(60)

    assert failures == []
    assert not taking.is_alive()
    assert not pinning.is_alive()
    store.unpin(image)
    store.check_integrity(3)


# The process

MEASURE = """
import json, sys, threading, time
from pathlib import Path
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.store import content_key
from handlers.worker.process_memory import bound_freed_memory
from handlers.settings.intake import IntakeSettings

def memory(field):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024

data, num_threads, decoding_bytes = Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), int(sys.argv[3])
side = int(sys.argv[5]) or None
loader = ImageLoader(IntakeSettings(decoding_bytes=decoding_bytes, decoding_timeout_s=600))
keys = []

def use(data):
    with loader.decoded(data, lambda: None, side) as picture:
        keys.append(content_key("", picture))

bound_freed_memory()
use(Path(sys.argv[4]).read_bytes())
before = memory("VmRSS")
threads = [threading.Thread(target=use, args=(data,)) for _ in range(num_threads)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
deadline = time.monotonic() + 60
while memory("VmRSS") - before > 25 << 20 and time.monotonic() < deadline:
    time.sleep(0.1)
print(json.dumps([len(keys), memory("VmHWM") - before, memory("VmRSS") - before]))
"""


def measure(
    folder: Path, data: bytes, num_threads: int, decoding_bytes: int, side: int | None = None
) -> tuple[int, int]:
    """Return a process's peak and remaining growth in bytes when threads decode an image.

    side: to which a model scales it.
    """
    large, small = folder / "large", folder / "small.png"
    large.write_bytes(data)
    small.write_bytes(png(10))
    arguments = [str(large), str(num_threads), str(decoding_bytes), str(small), str(side or 0)]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True, timeout=PROGRAM_S
    )
    num_decoded, peak, rest = json.loads(run.stdout)
    assert num_decoded == num_threads + 1
    return peak, rest


@pytest.mark.slow
def test_one_large_image_takes_twice_its_pixels(tmp_path: Path) -> None:
    """A PNG of 100 KB with 25 million pixels takes 10 bytes per pixel while it is decoded, and nothing afterwards."""
    peak, rest = measure(tmp_path, png(5000), num_threads=1, decoding_bytes=400 * MB)

    assert peak < 250 * MB
    assert rest < 25 * MB


@pytest.mark.slow
def test_eight_images_at_once_take_no_more_than_the_budget(tmp_path: Path) -> None:
    """Eight images of 9 million pixels take turns within a budget for two, and their memory returns."""
    peak, rest = measure(tmp_path, png(3000), num_threads=8, decoding_bytes=260 * MB)

    assert peak < 260 * MB
    assert rest < 25 * MB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "options", "mode", "bytes_per_pixel"),
    [
        ("JPEG", {"progressive": True, "subsampling": 0}, "RGB", 6),
        ("JPEG", {"progressive": True}, "CMYK", 8),
        ("JPEG", {}, "RGB", 1),
        ("WEBP", {}, "RGB", 18),
        ("WEBP", {"lossless": True}, "RGBA", 18),
        ("TIFF", {"exif": ROTATED}, "RGB", 8),
        ("PNG", {}, "RGBA", 4),
    ],
)
def test_a_reduced_image_takes_no_more_than_its_share(
    form: str, options: dict[str, Any], mode: str, bytes_per_pixel: int, tmp_path: Path
) -> None:
    """A reduced image stays within its share, although some decoders keep every pixel or its coefficients."""
    pixels = np.random.default_rng(0).integers(0, 256, (250, 250, 3), dtype=np.uint8)
    photo = Pillow.fromarray(pixels).resize((4000, 4000), Pillow.Resampling.BICUBIC).convert(mode)
    data = encoded(photo, form, **options)
    budget = 4000 * 4000 * bytes_per_pixel + 20 * MB

    peak, rest = measure(tmp_path, data, num_threads=1, decoding_bytes=budget, side=100)

    assert peak < budget + 20 * MB
    assert rest < 25 * MB
    loader = ImageLoader(IntakeSettings(decoding_bytes=max(peak - 25 * MB, 1)))
    with pytest.raises(ImageTooLarge), loader.decoded(data, go_on, 100):
        pass
