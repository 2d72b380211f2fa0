"""One object store for every kind of location: the URL's scheme says which of them does the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.https_store import HttpsStore
from torchmoor.async_inference.objects.object_store import Download, LocationRefused, ObjectStore
from torchmoor.async_inference.objects.s3_store import S3Store
from torchmoor.config.objects import ObjectSettings


def open_object_store(settings: ObjectSettings) -> ObjectStore:
    """The store of all URLs that these settings allow. Asks nobody yet. Close it in the end."""
    return SchemeStore(
        {"s3": S3Store(settings), "file": DirectoryStore(settings), "https": HttpsStore(settings)},
    )


class SchemeStore(ObjectStore):
    """stores: by scheme."""

    def __init__(self, stores: Mapping[str, ObjectStore]) -> None:
        self._stores = stores

    def _of(self, url: str) -> ObjectStore:
        store = self._stores.get(url.partition("://")[0])
        if store is None:
            raise LocationRefused(
                f"a location must begin with one of {', '.join(f'{name}://' for name in self._stores)}"
            )
        return store

    def check_input(self, url: str) -> None:
        self._of(url).check_input(url)

    def check_output(self, url: str) -> None:
        self._of(url).check_output(url)

    async def open(self, url: str) -> Download:
        return await self._of(url).open(url)

    async def upload(
        self,
        url: str,
        chunks: AsyncIterator[bytes],
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        return await self._of(url).upload(url, chunks, content_type, metadata)

    async def put(self, url: str, body: bytes, content_type: str = "") -> None:
        await self._of(url).put(url, body, content_type)

    async def publish(self, staged: str, final: str) -> None:
        if self._of(staged) is not self._of(final):
            raise LocationRefused("a result is staged in the store that it is published in")
        await self._of(final).publish(staged, final)

    async def delete(self, url: str) -> None:
        await self._of(url).delete(url)

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()
