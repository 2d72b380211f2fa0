"""Checks role, model data and image before a deployment, because SageMaker reports faults only after ten minutes.

A check for which the caller lacks rights prints a note and does not stop the deployment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

from scripts.sagemaker_deploy.account import Account, AwsError
from scripts.sagemaker_deploy.errors import DeployError
from scripts.sagemaker_deploy.settings import Deployment

# ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY, and then :TAG or @sha256:...
_ECR = re.compile(
    r"(?P<registry>(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?)"
    r"/(?P<repository>[a-z0-9._/-]+?)(?:@(?P<digest>sha256:[0-9a-f]{64})|:(?P<tag>[\w.-]+))?"
)
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::(\d{12}):role/(?:.*/)?([^/]+)")
SERVICE = "sagemaker.amazonaws.com"

Say = Callable[[str], None]


def look(account: Account, deployment: Deployment, say: Say) -> Deployment:
    """Run all checks. Return the deployment with its image named by digest.

    With the digest, an image that was pushed again under the same tag is a different deployment. Raises DeployError.
    """
    say(f"as {account.caller} in {account.region}")
    _look_at_role(account, deployment.role, say)
    _look_at_model_data(account, deployment, say)
    image = _find_image(account, deployment.image, say)
    return replace(deployment, container={**deployment.container, "Image": image})


def _look_at_role(account: Account, arn: str, say: Say) -> None:
    match = _ROLE.fullmatch(arn)
    if match is None:
        raise DeployError(f"--role must be a role's ARN, arn:aws:iam::ACCOUNT:role/NAME, not {arn!r}")
    try:
        found = account.find("iam", "get_role", RoleName=match[2])
    except AwsError as error:
        if not error.is_denied:
            raise
        say(f"note: may not look at {arn}; SageMaker will report it if it cannot be used")
        return
    if found is None or found["Role"]["Arn"] != arn:
        raise DeployError(f"there is no role {arn}; deploy/sagemaker/template.yaml makes one with the least rights")
    trust = found["Role"]["AssumeRolePolicyDocument"]
    if SERVICE not in (trust if isinstance(trust, str) else json.dumps(trust)):
        raise DeployError(f"{arn} does not trust {SERVICE}: its trust policy must let it do sts:AssumeRole")


def _find_image(account: Account, image: str, say: Say) -> str:
    match = _ECR.fullmatch(image)
    if match is None:
        raise DeployError(
            f"{image} is not an image in ECR, and SageMaker pulls from nowhere else: "
            "scripts/build_and_push.sh builds it, pushes it and prints its URI"
        )
    if match["region"] != account.region:
        raise DeployError(
            f"{image} lies in {match['region']}, but the endpoint will be in {account.region}: push it there as well, "
            f"scripts/build_and_push.sh --region {account.region}"
        )
    which = {"imageDigest": match["digest"]} if match["digest"] else {"imageTag": match["tag"] or "latest"}
    names = {"registryId": match["account"], "repositoryName": match["repository"]}
    try:
        found = account.find("ecr", "describe_images", **names, imageIds=[which])
    except AwsError as error:
        if not error.is_denied:
            raise
        say(f"note: may not look for {image}; SageMaker will report it if it does not exist")
        return image
    if found is None or not found["imageDetails"]:
        raise DeployError(f"{image} is not in ECR: scripts/build_and_push.sh builds and pushes it")
    return f"{match['registry']}/{match['repository']}@{found['imageDetails'][0]['imageDigest']}"


def _look_at_model_data(account: Account, deployment: Deployment, say: Say) -> None:
    where, container = deployment.model_data, deployment.container
    if where is None or not where.startswith("s3://"):
        return
    bucket, _, key = where.removeprefix("s3://").partition("/")
    is_many = container["Mode"] == "MultiModel"
    kind = container.get("ModelDataSource", {}).get("S3DataSource", {}).get("S3DataType")
    if is_many and key and not key.endswith("/"):
        raise DeployError(f"a MultiModel container has a prefix of archives, which ends in a slash: {where}/")
    try:
        if is_many or kind == "S3Prefix":
            found = account.find("s3", "list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
            is_there = found is not None and (is_many or found["KeyCount"] > 0)  # archives may come later
        else:
            is_there = account.find("s3", "head_object", Bucket=bucket, Key=key) is not None
    except AwsError as error:
        if not error.is_denied:
            raise
        say(f"note: may not look at {where}; SageMaker will report it if it cannot be read")
        return
    if not is_there:
        raise DeployError(f"there is nothing at {where}: put the model there first")
