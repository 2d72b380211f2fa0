"""The images of a request: read, checked against the limits, and put into the image store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from handlers.chat.images.fetch_pool import EarlyFetch, FetchPool
from handlers.chat.images.loader import ImageLoader
from handlers.chat.images.schemes import is_fetched
from handlers.chat.images.store import Image, ImageStore
from handlers.chat.messages import ImageReference
from handlers.errors import InvalidRequest
from handlers.requests.reply import PendingReply
from handlers.worker.counters import Counters


@dataclass(frozen=True, slots=True)
class ReceivedImage:
    """An image of a request, and its encoded bytes as received."""

    image: Image
    encoded: bytes


class ImageReceiver:
    """Reads the images of requests. Any thread; reading may take long.

    can_see: whether the model reads images. max_images: per conversation. This class checks a request's images before
    it reads them; `SessionImages.add` checks the sum.
    """

    def __init__(
        self,
        loader: ImageLoader,
        fetching: FetchPool,
        store: ImageStore,
        counters: Counters,
        *,
        can_see: bool,
        max_images: int,
    ) -> None:
        self._loader = loader
        self._fetching = fetching
        self._store = store
        self._counters = counters
        self._can_see = can_see
        self._max_images = max_images

    def receive(self, scope: str, references: Sequence[ImageReference], reply: PendingReply) -> list[ReceivedImage]:
        """Read these images and hold each in the store. Stops as soon as the reply is cancelled.

        Raises the BadImage family, InvalidRequest, OutOfMemory, and the reason for which the reply was cancelled.
        """
        if references and not self._can_see:
            raise InvalidRequest("this model reads text only; ask without an image")
        check_num_images(len(references), self._max_images)
        received: list[ReceivedImage] = []
        early = self._fetch_early(references, reply)
        try:
            for number, reference in enumerate(references):
                reply.raise_if_cancelled()
                self._counters.add("images_received")
                encoded = early[number].take() if number in early else None
                if encoded is None:
                    encoded = self._loader.read(reference, reply)
                self._counters.add("images_fetched", int(is_fetched(reference)))
                reply.raise_if_cancelled()
                image = self._store.take_in(scope, encoded, reply.raise_if_cancelled)
                received.append(ReceivedImage(image, encoded))
        except BaseException:
            for fetch in early.values():
                fetch.cancel()
            self.release(received)
            raise
        return received

    def _fetch_early(self, references: Sequence[ImageReference], reply: PendingReply) -> dict[int, EarlyFetch]:
        """Begin to fetch all images but the first that is fetched; return the fetches by the references' numbers."""
        if reply.fetch_line is None:
            return {}
        fetched = [(number, each) for number, each in enumerate(references) if is_fetched(each)]
        return {
            number: self._fetching.fetch_early(reply, partial(self._loader.read_early, reference))
            for number, reference in fetched[1:]
        }

    @contextmanager
    def released_on_error(self, received: Sequence[ReceivedImage]) -> Iterator[None]:
        """Release these images if the block raises."""
        try:
            yield
        except BaseException:
            self.release(received)
            raise

    def release(self, received: Sequence[ReceivedImage], *, is_kept: bool = False) -> None:
        """Release these images; is_kept as for `ImageStore.release`."""
        for item in received:
            self._store.release(item.image, is_kept=is_kept)


def check_num_images(number: int, most: int) -> None:
    """Raise InvalidRequest if a conversation would have too many images."""
    if number > most:
        raise InvalidRequest(f"a conversation may have {most} images, not {number}")
