"""Makes boto3 clients of a local fleet."""

from typing import Any

import boto3
from botocore.config import Config


def make_runtime_client(url: str) -> Any:
    """Return a client of the SageMaker runtime API at this URL; it uses no proxy of the environment."""
    return boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(read_timeout=600, max_pool_connections=64, proxies={}),
    )
