"""Asynchronous inference as it is assembled from the proxy's settings."""

from pathlib import Path

from torchmoor.async_inference.request import AsyncRecord, AsyncRequest, AsyncState
from torchmoor.config.async_inference import AsyncEndpointSettings, AsyncInferenceSettings
from torchmoor.config.objects import ObjectSettings
from torchmoor.config.routing import EndpointSettings, VariantSettings
from torchmoor.config.settings import ProxySettings
from torchmoor.proxy.instances.registry import Registry
from torchmoor.run.async_parts import make_async_inference
from torchmoor.run.processes.totals import Totals

VARIANTS = (VariantSettings(model="chat"),)


async def test_operators_can_read_results_that_are_longer_than_an_input_may_be(tmp_path: Path) -> None:
    """The limit of results is the only one that applies to them."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "one.out").write_bytes(b"x" * 100)
    settings = ProxySettings(
        endpoints=(EndpointSettings(name="chat", variants=VARIANTS, async_inference=AsyncEndpointSettings()),),
        async_inference=AsyncInferenceSettings(queue=f"sqlite://{tmp_path}/queue.db", output_root=results.as_uri()),
        objects=ObjectSettings(output_directories=(str(results),), max_input_bytes=10),
    )
    registry = Registry(settings.endpoints)
    service = make_async_inference(settings, registry, lambda: Totals(registry).variants, None)
    ended = AsyncRecord(
        request=AsyncRequest(
            inference_id="one",
            endpoint="chat",
            body=b"{}",
            output_location=(results / "one.out").as_uri(),
            failure_location=(results / "one.err").as_uri(),
        ),
        arrival=1,
        state=AsyncState.COMPLETED,
        attempts=1,
        due_at=None,
        updated_at=0.0,
    )

    async with service, await service.open_result(ended) as download:
        assert b"".join([chunk async for chunk in download.chunks]) == b"x" * 100
