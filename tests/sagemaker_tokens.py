"""Makes SageMaker's bearer tokens as sagemaker-core 2.27 does (sagemaker.core.token_generator).

That package cannot be installed beside version 2 of the SageMaker SDK, whose packages it replaces.
"""

from base64 import b64encode

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as Signer

MAX_LIFETIME_S = 43_200


def make_token(
    key_id: str,
    secret: str,
    session_token: str | None = None,
    *,
    region: str = "us-east-1",
    lifetime_s: int = MAX_LIFETIME_S,
    method: str = "POST",
    url: str = "https://sagemaker.amazonaws.com/?Action=CallWithBearerToken",
    service: str = "sagemaker",
) -> str:
    """Return a token; the arguments after lifetime_s are fixed in the package."""
    host = url.split("/")[2]
    request = AWSRequest(method=method, url=url, headers={"host": host})
    SigV4QueryAuth(Signer(key_id, secret, session_token), service, region, expires=lifetime_s).add_auth(request)
    return encode_url(f"{request.url.removeprefix('https://')}&Version=1")


def encode_url(url: str) -> str:
    """Return the token of a presigned URL."""
    return f"sagemaker-api-key-{b64encode(url.encode()).decode()}"
