"""The ARNs of resources, and the service's errors about a resource that is missing or exists already."""

from __future__ import annotations

import uuid

from torchmoor.errors import RequestInvalid

MODEL = "model"
CONFIG = "endpoint-config"
ENDPOINT = "endpoint"
SCALING_ROLE = (
    "sagemaker.application-autoscaling.amazonaws.com/AWSServiceRoleForApplicationAutoScaling_SageMakerEndpoint"
)
_WORDS = {MODEL: "model", CONFIG: "endpoint configuration", ENDPOINT: "endpoint"}


class Arns:
    """The ARNs of an account in a region."""

    def __init__(self, region: str, account_id: str) -> None:
        self._account_id = account_id
        self._place = f"{region}:{account_id}"
        self._prefix = f"arn:aws:sagemaker:{self._place}:"

    def arn(self, kind: str, name: str) -> str:
        """Return a resource's ARN."""
        return f"{self._prefix}{kind}/{name}"

    def target_arn(self, resource: str) -> str:
        identity = uuid.uuid5(uuid.NAMESPACE_URL, resource).hex
        return f"arn:aws:application-autoscaling:{self._place}:scalable-target/{identity}"

    def policy_arn(self, resource: str, policy: str) -> str:
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{resource}/{policy}")
        return (
            f"arn:aws:autoscaling:{self._place}:scalingPolicy:{identity}:resource/sagemaker/{resource}"
            f":policyName/{policy}"
        )

    def scaling_role_arn(self) -> str:
        """Return the ARN of the service's own role, which AWS names for a target that is registered without a role."""
        return f"arn:aws:iam::{self._account_id}:role/aws-service-role/{SCALING_ROLE}"

    def alarm_arn(self, name: str) -> str:
        return f"arn:aws:cloudwatch:{self._place}:alarm:{name}"

    def missing(self, kind: str, name: str) -> RequestInvalid:
        """Make the error about a resource that does not exist, in the service's words."""
        return RequestInvalid(f'Could not find {_WORDS[kind]} "{self.arn(kind, name)}".')

    def existing(self, kind: str, name: str) -> RequestInvalid:
        """Make the error about a name that is taken, in the service's words."""
        return RequestInvalid(f'Cannot create already existing {_WORDS[kind]} "{self.arn(kind, name)}".')

    def parse(self, arn: str) -> tuple[str, str]:
        """Return the kind and the name of a resource. Raises RequestInvalid."""
        kind, _, name = arn.removeprefix(self._prefix).partition("/")
        if not arn.startswith(self._prefix) or kind not in _WORDS or not name:
            raise RequestInvalid(f"{arn!r} is not the ARN of a resource that is served here: {self._prefix}KIND/NAME.")
        return kind, name
