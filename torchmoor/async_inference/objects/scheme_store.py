"""Object store that selects the store for a URL by its scheme."""

from __future__ import annotations

from collections.abc import AsyncIterator

from torchmoor.async_inference.objects.directory_store import DirectoryStore
from torchmoor.async_inference.objects.https_store import HttpsStore
from torchmoor.async_inference.objects.object_store import (
    NO_METADATA,
    Download,
    InputStore,
    LocationRefused,
    ObjectMetadata,
    ObjectStore,
)
from torchmoor.async_inference.objects.s3_store import S3Store
from torchmoor.config.objects import ObjectSettings


class SchemeStore(ObjectStore):
    """Serves every location that the settings allow. Connects on first use; close it at the end."""

    def __init__(self, settings: ObjectSettings) -> None:
        self._outputs: dict[str, ObjectStore] = {"s3": S3Store(settings), "file": DirectoryStore(settings)}
        self._inputs: dict[str, InputStore] = {**self._outputs, "https": HttpsStore(settings)}

    def _input(self, url: str) -> InputStore:
        store = self._inputs.get(url.partition("://")[0])
        if store is None:
            raise LocationRefused(
                f"a location must begin with one of {', '.join(f'{name}://' for name in self._inputs)}"
            )
        return store

    def _output(self, url: str) -> ObjectStore:
        if self._input(url) is self._inputs["https"]:
            raise LocationRefused("results cannot be written to https locations; name s3:// or file://")
        return self._outputs[url.partition("://")[0]]

    def check_input(self, url: str) -> None:
        self._input(url).check_input(url)

    def check_output(self, url: str) -> None:
        self._output(url).check_output(url)

    async def open(self, url: str) -> Download:
        return await self._input(url).open(url)

    async def is_taken(self, url: str) -> bool:
        return await self._output(url).is_taken(url)

    async def find_shortage(self, url: str) -> str | None:
        return await self._output(url).find_shortage(url)

    async def sweep(self) -> int:
        return sum([await store.sweep() for store in self._outputs.values()])

    async def upload(self, url: str, chunks: AsyncIterator[bytes], metadata: ObjectMetadata = NO_METADATA) -> str:
        return await self._output(url).upload(url, chunks, metadata)

    async def put(self, url: str, body: bytes, metadata: ObjectMetadata = NO_METADATA) -> None:
        await self._output(url).put(url, body, metadata)

    async def publish(self, staged: str, tag: str, final: str) -> None:
        if self._output(staged) is not self._output(final):
            raise LocationRefused("a result is staged in the store that it is published in")
        await self._output(final).publish(staged, tag, final)

    async def delete(self, url: str) -> None:
        await self._output(url).delete(url)

    async def delete_all(self, prefix: str) -> None:
        await self._output(prefix).delete_all(prefix)

    async def close(self) -> None:
        for store in self._inputs.values():
            await store.close()
