"""A worker's image store: holders, pins, eviction, and the state after failures."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from PIL import Image as Pillow

from handlers.chat.images.store import MAX_ENCODINGS, Image, ImageStore, ImageTier
from handlers.errors import JournalUnavailable, NotAnImage, OutOfMemory
from handlers.worker.counters import Counters

ONE = 2 * 4 * 4  # bytes of an image's features here
SCOPE = "endpoint|caller"


class Pictures:
    """Decode and encode fake images, whose bytes are the colour and a variable rest."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.num_encoded: Counter[int] = Counter()
        self.on_decode: Callable[[], None] = lambda: None
        self.on_encode: Callable[[], None] = lambda: None

    def decoded(self, encoded: bytes, check: Callable[[], None]) -> Pillow.Image:
        self.on_decode()
        return Pillow.new("RGB", (2, 2), (encoded[0], 0, 0))

    def encode(self, picture: Pillow.Image) -> torch.Tensor:
        self.on_encode()
        colour: Any = picture.getpixel((0, 0))
        self.num_encoded[colour[0]] += 1
        return torch.full((2, 4), float(colour[0]))

    def store(self, features: int = 100, host_bytes: int = 1000, is_durable: bool = False) -> ImageStore:
        """Create a store. features: how many images' features fit."""
        return ImageStore(features * ONE, host_bytes, is_durable, self.decoded, self.encode, self.counters)


@pytest.fixture
def pictures() -> Pictures:
    return Pictures()


def no_journal() -> bytes:
    raise AssertionError("the bytes must be on the host")


def features_of(store: ImageStore, image: Image, fetch: Callable[[], bytes] = no_journal) -> tuple[float, ImageTier]:
    """Pin and unpin an image's features; return their colour and location."""
    features, tier = store.pin(image, fetch)
    assert len(features) == image.num_tokens
    colour = float(features[0, 0])
    store.unpin(image)
    return colour, tier


def test_an_image_is_encoded_once_for_all_who_hold_it(pictures: Pictures) -> None:
    """The second holder gets the same key at no cost, and keeps the image when the first releases it."""
    store = pictures.store()

    first, second = store.take_in(SCOPE, b"\x05"), store.take_in(SCOPE, b"\x05")

    assert first == second
    assert pictures.num_encoded == {5: 1}
    assert (store.features_bytes, store.host_bytes, len(store)) == (ONE, 1, 1)
    store.release(first)
    assert features_of(store, second) == (5.0, ImageTier.FEATURES)
    store.release(second)
    assert (store.features_bytes, store.host_bytes, len(store)) == (0, 0, 0)


def test_another_encoding_of_the_same_pixels_is_the_same_image(pictures: Pictures) -> None:
    """Images are encoded once per content; each encoding keeps the name of its own bytes."""
    store = pictures.store()

    first, second = store.take_in(SCOPE, b"\x05png"), store.take_in(SCOPE, b"\x05another")

    assert first.key == second.key
    assert first.digest != second.digest
    assert pictures.num_encoded == {5: 1}
    assert store.host_bytes == 4


def test_known_bytes_are_not_decoded_again(pictures: Pictures) -> None:
    """An image that is sent repeatedly is decoded once, and forgotten when its last holder releases it."""
    store = pictures.store()
    held = [store.take_in(SCOPE, b"\x05")]

    def fail() -> None:
        raise AssertionError("decoded again")

    pictures.on_decode = fail
    held.append(store.take_in(SCOPE, b"\x05"))

    pictures.on_decode = lambda: None
    for image in held:
        store.release(image)
    held = [store.take_in(SCOPE, b"\x05")]
    assert pictures.num_encoded == {5: 2}
    store.check_integrity(1)


def test_other_scopes_share_nothing(pictures: Pictures) -> None:
    """The same bytes of two callers are two images, so that neither detects the other's."""
    store = pictures.store()

    mine, theirs = store.take_in("e|mine", b"\x05"), store.take_in("e|theirs", b"\x05")

    assert mine.key != theirs.key
    assert pictures.num_encoded == {5: 2}
    assert store.features_bytes == 2 * ONE
    store.release(theirs)
    assert features_of(store, mine) == (5.0, ImageTier.FEATURES)


def test_keys_are_negative_and_differ(pictures: Pictures) -> None:
    """Keys are negative, because they are stored among token ids, which are not."""
    store = pictures.store()

    keys = [store.take_in(SCOPE, bytes([colour])).key for colour in range(20)]

    assert all(key < 0 for key in keys)
    assert len(set(keys)) == 20


def test_features_that_nobody_used_for_longest_are_given_up(pictures: Pictures) -> None:
    """As few features as possible are evicted, never those of running turns; they are computed again from bytes."""
    store = pictures.store(features=3)
    images = [store.take_in(SCOPE, bytes([colour])) for colour in (1, 2, 3)]
    assert features_of(store, images[0]) == (1.0, ImageTier.FEATURES)  # now the second is the oldest
    store.pin(images[1], no_journal)  # and now the third

    newcomer = store.take_in(SCOPE, b"\x04")

    assert store.features_bytes == 3 * ONE
    tiers = [features_of(store, image)[1] for image in (newcomer, images[0], images[1])]
    assert tiers == [ImageTier.FEATURES] * 3
    assert features_of(store, images[2]) == (3.0, ImageTier.HOST)
    assert pictures.counters.get("images_demoted") == 2
    store.unpin(images[1])
    store.check_integrity(4)


def test_pinned_features_stay_and_who_needs_their_room_is_refused(pictures: Pictures) -> None:
    """A turn without memory gets OutOfMemory and evicts nothing; loading an image needs no device memory yet."""
    store = pictures.store(features=2)
    idle, pinned = store.take_in(SCOPE, b"\x01"), store.take_in(SCOPE, b"\x02")
    store.pin(idle, no_journal)
    store.pin(pinned, no_journal)

    third = store.take_in(SCOPE, b"\x03")
    with pytest.raises(OutOfMemory) as caught:
        store.pin(third, no_journal)

    assert caught.value.status == 507
    store.unpin(idle)
    assert pictures.counters.get("images_demoted") == 0
    assert features_of(store, third) == (3.0, ImageTier.HOST)
    store.unpin(pinned)
    store.check_integrity(3)


def test_an_image_larger_than_the_device_may_hold_is_refused(pictures: Pictures) -> None:
    """An image that exceeds the device memory is refused when it arrives, since no turn could use it."""
    store = pictures.store(features=0)

    with pytest.raises(OutOfMemory):
        store.take_in(SCOPE, b"\x01")

    assert (len(store), store.features_bytes, store.host_bytes) == (0, 0, 0)
    store.check_integrity(0)


def test_an_image_in_ever_new_encodings_takes_no_more_memory(pictures: Pictures) -> None:
    """Only a few encodings of the same image are remembered."""
    store = pictures.store()

    images = [store.take_in(SCOPE, bytes([1, number])) for number in range(100)]

    assert len({image.key for image in images}) == len(store) == 1
    assert pictures.num_encoded == {1: 1}
    decoded: list[int] = []
    pictures.on_decode = lambda: decoded.append(1)
    newest = [store.take_in(SCOPE, bytes([1, number])) for number in range(100 - MAX_ENCODINGS, 100)]
    assert decoded == []
    older = store.take_in(SCOPE, bytes([1, 99 - MAX_ENCODINGS]))
    assert decoded == [1]
    store.check_integrity(101 + MAX_ENCODINGS)
    for image in (*images, *newest, older):
        store.release(image)
    assert len(store) == 0
    store.check_integrity(0)


def test_without_a_journal_bytes_are_never_given_up(pictures: Pictures) -> None:
    """A full host memory refuses new images and keeps the present ones."""
    store = pictures.store(features=1, host_bytes=20)
    images = [store.take_in(SCOPE, bytes([colour]) + bytes(9)) for colour in (1, 2)]

    with pytest.raises(OutOfMemory) as caught:
        store.take_in(SCOPE, b"\x03")

    assert "journal" in caught.value.message
    assert (len(store), store.host_bytes) == (2, 20)
    assert [features_of(store, image)[0] for image in images] == [1.0, 2.0]
    store.release(images[0])
    store.release(store.take_in(SCOPE, b"\x03"))
    store.check_integrity(1)


def test_with_a_journal_the_least_recently_used_bytes_go_first(pictures: Pictures) -> None:
    """Evicted bytes are read from the journal again and kept on the host."""
    store = pictures.store(features=1, host_bytes=20, is_durable=True)
    data = {colour: bytes([colour]) + bytes(9) for colour in (1, 2, 3)}
    images = {colour: store.take_in(SCOPE, data[colour]) for colour in data}

    assert store.host_bytes == 20
    assert features_of(store, images[2]) == (2.0, ImageTier.HOST)
    assert features_of(store, images[1], lambda: data[1]) == (1.0, ImageTier.JOURNAL)
    assert features_of(store, images[2]) == (2.0, ImageTier.HOST)
    assert features_of(store, images[3], lambda: data[3]) == (3.0, ImageTier.JOURNAL)
    store.check_integrity(3)


def test_bytes_larger_than_the_host_may_hold_push_nobody_out(pictures: Pictures) -> None:
    """With a journal, bytes larger than the host memory are not kept there and evict nothing."""
    store = pictures.store(host_bytes=20, is_durable=True)
    small = store.take_in(SCOPE, b"\x01")

    store.take_in(SCOPE, b"\x02" + bytes(20))

    assert store.host_bytes == 1
    assert store.measure([small]) == (ONE + 1, ImageTier.FEATURES)


def test_an_image_that_is_kept_may_go_when_its_room_is_needed(pictures: Pictures) -> None:
    """An image of a request without a session is shared until its features are evicted."""
    store = pictures.store(features=2)
    store.release(store.take_in(SCOPE, b"\x01"), is_kept=True)
    assert (store.features_bytes, store.host_bytes, len(store)) == (ONE, 0, 1)

    store.release(store.take_in(SCOPE, b"\x01"), is_kept=True)
    assert pictures.num_encoded == {1: 1}
    for colour in (2, 3):
        store.take_in(SCOPE, bytes([colour]))

    assert len(store) == 2
    store.check_integrity(2)


def test_a_session_that_takes_up_a_kept_image_keeps_its_bytes(pictures: Pictures) -> None:
    """A session keeps an image's bytes even if the request that loaded it did not.

    Otherwise the session's image would be lost with its features.
    """
    store = pictures.store(features=1)
    store.release(store.take_in(SCOPE, b"\x01"), is_kept=True)

    image = store.take_in(SCOPE, b"\x01")
    store.take_in(SCOPE, b"\x02")

    assert features_of(store, image) == (1.0, ImageTier.HOST)


def test_a_kept_image_that_finds_no_room_on_the_host_is_not_taken_up(pictures: Pictures) -> None:
    """A cached image whose bytes do not fit the host memory is refused and stays as it was."""
    store = pictures.store(host_bytes=10)
    store.release(store.take_in(SCOPE, b"\x01" + bytes(5)), is_kept=True)
    store.take_in(SCOPE, b"\x02" + bytes(5))

    with pytest.raises(OutOfMemory):
        store.take_in(SCOPE, b"\x01" + bytes(5))

    store.check_integrity(1)


def test_an_image_that_finds_no_room_is_not_computed_in_vain(pictures: Pictures) -> None:
    """The size of a known image is checked first, so that a turn that waits for memory computes nothing."""
    store = pictures.store(features=1)
    image, other = store.take_in(SCOPE, b"\x01"), store.take_in(SCOPE, b"\x02")
    store.pin(other, no_journal)

    with pytest.raises(OutOfMemory):
        store.pin(image, no_journal)

    assert pictures.num_encoded == {1: 1, 2: 1}
    store.unpin(other)
    assert features_of(store, image) == (1.0, ImageTier.HOST)


@pytest.mark.parametrize("stage", ["decode", "encode"])
@pytest.mark.parametrize("failure", [NotAnImage("no"), OutOfMemory("full"), RuntimeError("boom"), KeyboardInterrupt()])
def test_failure_while_taking_in_leaves_nothing(pictures: Pictures, stage: str, failure: BaseException) -> None:
    """After a failure the image is unknown, and can be loaded again."""
    store = pictures.store()

    def fail() -> None:
        raise failure

    setattr(pictures, f"on_{stage}", fail)
    with pytest.raises(type(failure)):
        store.take_in(SCOPE, b"\x01")

    assert (len(store), store.features_bytes, store.host_bytes) == (0, 0, 0)
    store.check_integrity(0)
    setattr(pictures, f"on_{stage}", lambda: None)
    assert features_of(store, store.take_in(SCOPE, b"\x01")) == (1.0, ImageTier.FEATURES)


@pytest.mark.parametrize("stage", ["decode", "encode", "fetch"])
def test_failure_while_computing_again_leaves_nothing_pinned(pictures: Pictures, stage: str) -> None:
    """The turn fails, nothing stays pinned, and the next turn succeeds."""
    store = pictures.store(features=1, host_bytes=1, is_durable=True)
    image, other = store.take_in(SCOPE, b"\x01"), store.take_in(SCOPE, b"\x02")
    stages = {name: lambda: None for name in ("decode", "encode", "fetch")}

    def fail() -> None:
        raise JournalUnavailable("try again")

    def fetch() -> bytes:
        stages["fetch"]()
        return b"\x01"

    stages[stage] = fail
    pictures.on_decode, pictures.on_encode = stages["decode"], stages["encode"]
    with pytest.raises(JournalUnavailable):
        store.pin(image, fetch)

    store.check_integrity(2)
    stages[stage] = pictures.on_decode = pictures.on_encode = lambda: None
    assert features_of(store, image, fetch) == (1.0, ImageTier.JOURNAL)
    assert features_of(store, other, lambda: b"\x02") == (2.0, ImageTier.JOURNAL)


def test_eight_at_once_encode_an_image_once(pictures: Pictures) -> None:
    """Seven of eight concurrent callers wait for the first; all hold the image."""
    store = pictures.store()
    start, is_first_inside = threading.Barrier(8), threading.Event()
    pictures.on_encode = lambda: assert_only(is_first_inside)
    images: list[Image] = []

    def take_in() -> None:
        start.wait()
        images.append(store.take_in(SCOPE, b"\x01"))

    run_all([take_in] * 8)

    assert pictures.num_encoded == {1: 1}
    assert len(images) == 8
    store.check_integrity(8)


def assert_only(is_inside: threading.Event) -> None:
    assert not is_inside.is_set()
    is_inside.set()


def test_eight_at_once_compute_given_up_features_once(pictures: Pictures) -> None:
    """Concurrent turns with one image share the computation of its evicted features."""
    store = pictures.store(features=1)
    image = store.take_in(SCOPE, b"\x01")
    store.take_in(SCOPE, b"\x02")
    start = threading.Barrier(8)
    found: list[tuple[float, ImageTier]] = []

    def use() -> None:
        start.wait()
        features, tier = store.pin(image, no_journal)
        found.append((float(features[0, 0]), tier))

    run_all([use] * 8)

    assert [colour for colour, _ in found] == [1.0] * 8
    assert pictures.num_encoded == {1: 2, 2: 1}
    for _ in found:
        store.unpin(image)
    store.check_integrity(2)


def test_one_who_waited_for_a_failed_encoding_tries_itself(pictures: Pictures) -> None:
    """After the first caller's failure, a waiting caller encodes the image itself."""
    store = pictures.store()
    is_inside, may_fail = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def fail_once() -> None:
        pictures.on_encode = lambda: None
        is_inside.set()
        assert may_fail.wait(20)
        raise OutOfMemory("full")

    def take_in_and_fail() -> None:
        try:
            store.take_in(SCOPE, b"\x01")
        except OutOfMemory as exc:
            failures.append(exc)

    pictures.on_encode = fail_once
    first = threading.Thread(target=take_in_and_fail)
    second = threading.Thread(target=lambda: store.take_in(SCOPE, b"\x01"))
    first.start()
    assert is_inside.wait(20)
    second.start()
    may_fail.set()
    first.join(20)
    second.join(20)

    assert len(failures) == 1
    assert pictures.num_encoded == {1: 1}
    store.check_integrity(1)


@pytest.mark.parametrize("seed", range(3))
def test_random_use_by_many_threads_adds_up(pictures: Pictures, seed: int) -> None:
    """Concurrent loading, pinning and releasing, with memory for two images, gives every caller its own image."""
    store = pictures.store(features=2, host_bytes=6, is_durable=True)
    refused: list[OutOfMemory] = []

    def use(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for _ in range(60):
            data = bytes([rng.randrange(5)]) + bytes(rng.randrange(3))
            try:
                image = store.take_in(rng.choice(["a|b", "a|c"]), data)
            except OutOfMemory as exc:
                refused.append(exc)
                continue
            try:
                assert features_of(store, image, lambda data=data: data)[0] == data[0]
            except OutOfMemory as exc:
                refused.append(exc)
            store.release(image, is_kept=rng.random() < 0.5)

    run_all([lambda number=number: use(number) for number in range(4)])

    assert len(refused) < 4 * 60
    assert store.host_bytes == 0
    store.check_integrity(0)


def run_all(actions: list[Callable[[], None]]) -> None:
    """Run each function on a thread; fail if one of them does."""
    failures: list[BaseException] = []

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not failures, failures


class ImageLives(RuleBasedStateMachine):
    """Invariants under any operations: held images are available, counts are right, limits hold."""

    is_durable = False

    def __init__(self) -> None:
        super().__init__()
        self.store = Pictures().store(features=3, host_bytes=12, is_durable=self.is_durable)
        self.held: list[tuple[Image, bytes]] = []
        self.pinned: list[Image] = []

    @rule(colour=st.integers(0, 5), tail=st.integers(0, 3), scope=st.sampled_from(["a|", "b|"]))
    def take_in(self, colour: int, tail: int, scope: str) -> None:
        data = bytes([colour]) + bytes(tail)
        try:
            self.held.append((self.store.take_in(scope, data), data))
        except OutOfMemory:
            is_host_full = not self.is_durable and self.store.host_bytes + len(data) > 12
            assert is_host_full or len(set(self.pinned)) >= 3

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_kept=st.booleans())
    def let_go(self, data: st.DataObject, is_kept: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        image = self.held[index][0]
        if image not in self.pinned:  # a turn pins its session's images
            del self.held[index]
            self.store.release(image, is_kept=is_kept)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        image, encoded = data.draw(st.sampled_from(self.held))
        try:
            features, _ = self.store.pin(image, lambda: encoded if self.is_durable else no_journal())
        except OutOfMemory:
            assert len({pinned.key for pinned in self.pinned}) >= 3
        else:
            self.pinned.append(image)
            assert float(features[0, 0]) == encoded[0]

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.store.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @invariant()
    def adds_up(self) -> None:
        store = self.store
        for image in self.pinned:
            assert store.measure([image])[1] is ImageTier.FEATURES
        if not self.is_durable:
            for image, _ in self.held:
                num_bytes, tier = store.measure([image])
                assert num_bytes > (ONE if tier is ImageTier.FEATURES else 0)  # encoded bytes, too
        assert store.host_bytes <= store.max_host_bytes
        if not self.pinned:
            store.check_integrity(len(self.held))

    def teardown(self) -> None:
        for image in self.pinned:
            self.store.unpin(image)
        for image, _ in self.held:
            self.store.release(image)
        self.store.check_integrity(0)
        assert self.store.host_bytes == 0


class DurableImageLives(ImageLives):
    """The same with a journal."""

    is_durable = True


TestImageLives = ImageLives.TestCase
TestImageLives.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDurableImageLives = DurableImageLives.TestCase
TestDurableImageLives.settings = TestImageLives.settings
