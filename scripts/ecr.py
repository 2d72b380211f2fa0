"""Send the requests of build_and_push.sh to ECR with boto3, so that the script does not need the AWS CLI.

python scripts/ecr.py registry              print this account's registry
python scripts/ecr.py create REPOSITORY     create the repository if it does not exist
python scripts/ecr.py password [ACCOUNT]    print a password for `login --username AWS --password-stdin`
"""

from __future__ import annotations

import argparse
import base64
import sys
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

CONFIG = Config(connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 4})


def main(arguments: list[str]) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("registry", "create", "password"))
    parser.add_argument("name", nargs="?", help="the repository to create, or the account of the registry to log in to")
    parser.add_argument("--region", help="default: the region of the AWS configuration")
    parser.add_argument("--profile", help="profile of the AWS configuration")
    parser.add_argument("--endpoint-url", help="URL of an emulated AWS")
    options = parser.parse_args(arguments)
    if options.command == "create" and not options.name:
        parser.error("name the repository: create REPOSITORY")
    try:
        session = boto3.Session(region_name=options.region or None, profile_name=options.profile or None)
        more = {"endpoint_url": options.endpoint_url or None, "config": CONFIG}
        if options.command == "registry":
            account = session.client("sts", **more).get_caller_identity()["Account"]
            suffix = ".cn" if (session.region_name or "").startswith("cn-") else ""
            print(f"{account}.dkr.ecr.{session.region_name}.amazonaws.com{suffix}")
        elif options.command == "create":
            create(session.client("ecr", **more), options.name)
        else:
            ids = {"registryIds": [options.name]} if options.name else {}
            [granted] = session.client("ecr", **more).get_authorization_token(**ids)["authorizationData"]
            print(base64.b64decode(granted["authorizationToken"]).decode().partition(":")[2])
    except (BotoCoreError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def create(ecr: Any, name: str) -> None:
    """Create a repository that scans and encrypts images. An existing repository stays unchanged."""
    try:
        ecr.create_repository(
            repositoryName=name,
            imageScanningConfiguration={"scanOnPush": True},
            encryptionConfiguration={"encryptionType": "AES256"},
        )
    except ClientError as error:
        if error.response["Error"]["Code"] != "RepositoryAlreadyExistsException":
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
