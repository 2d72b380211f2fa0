"""The fields by which LangChain's classes reach an endpoint."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from botocore.config import Config
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from torchmoor.clients.runtime import make_client, readable_errors


class EndpointConnection(BaseModel):
    """Names and credentials, with the field names of langchain_aws.SagemakerEndpoint.

    endpoint_url: the proxy's; None: SageMaker's. timeout: seconds without data. client: a boto3 client to use.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    endpoint_name: str
    endpoint_url: str | None = None
    region_name: str | None = None
    credentials_profile_name: str | None = None
    aws_access_key_id: SecretStr | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: SecretStr | None = None
    timeout: float = Field(default=120.0, gt=0)
    connect_timeout: float = Field(default=10.0, gt=0)
    max_retries: int = Field(default=2, ge=0)
    client: Any = Field(default=None, exclude=True)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "endpoint_name": self.endpoint_name,
            "endpoint_url": self.endpoint_url,
            "model_kwargs": self.model_kwargs,
        }

    @cached_property
    def runtime(self) -> Any:
        """boto3's sagemaker-runtime client. Raises EndpointError."""
        return self.client or self.make_client("sagemaker-runtime", self.endpoint_url)

    def make_client(self, service: str, endpoint_url: str | None = None) -> Any:
        """Make boto3's client of a service. Raises EndpointError, ValueError for an invalid address."""
        given = {
            name: value.get_secret_value()
            for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
            if (value := getattr(self, name)) is not None
        }
        config = Config(
            connect_timeout=self.connect_timeout,
            read_timeout=self.timeout,
            retries={"mode": "standard", "total_max_attempts": self.max_retries + 1},
        )
        with readable_errors():
            return make_client(
                service,
                endpoint_url=endpoint_url,
                region_name=self.region_name,
                profile_name=self.credentials_profile_name,
                keys=given,
                config=config,
            )
