"""Share one fleet in this folder: two instances with a checkpoint and a journal in S3, few sessions, and adapters."""

from collections.abc import Iterator

import pytest

from tests.servers import S3Server
from tests.torchserve.in_s3.fleet import FleetInS3, run_in_s3


@pytest.fixture(scope="package")
def in_s3(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetInS3]:
    with run_in_s3(s3_server, tmp_path_factory.mktemp("in-s3")) as running:
        yield running
