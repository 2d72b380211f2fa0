"""How LangChain's classes reach an endpoint: the fields that they share."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from botocore.config import Config
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from torchmoor.clients.runtime import make_client, readable_errors


class EndpointConnection(BaseModel):
    """Names and credentials as langchain_aws.SagemakerEndpoint has them.

    endpoint_url: of a proxy of one's own; None: SageMaker's. timeout: seconds of silence. client: a boto3 client
    instead of one that is made.
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

    @cached_property
    def runtime(self) -> Any:
        """The sagemaker-runtime client. Raises EndpointError."""
        return self.client or self.make_client("sagemaker-runtime", self.endpoint_url)

    def make_client(self, service: str, endpoint_url: str | None = None) -> Any:
        """Raises EndpointError, ValueError if the address is none."""
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
