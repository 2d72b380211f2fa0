"""What the clients of this folder share: the SDK's session, an upload, and the end."""

import functools
import json
import tarfile
import warnings
from pathlib import Path

import boto3

warnings.simplefilter("ignore")  # the SDK warns about its next version

import sagemaker  # noqa: E402

ROLE = "arn:aws:iam::000000000000:role/service-role/execution"  # the SDK would ask AWS's own STS for it
QUICK = {"Delay": 1, "MaxAttempts": 200}
TGI_VARIABLES = {  # as they are published, but for four GPUs
    "HF_MODEL_ID": "/opt/ml/model",
    "SM_NUM_GPUS": json.dumps(4),
    "MAX_INPUT_LENGTH": json.dumps(200),
    "MAX_TOTAL_TOKENS": json.dumps(256),
}


def make_session(bucket):
    """Return the SDK's session, which polls every second instead of every 30 s."""
    session = sagemaker.Session(default_bucket=bucket)  # the SDK would ask AWS's own STS for one
    session.wait_for_endpoint = functools.partial(session.wait_for_endpoint, poll=1)
    return session


def upload_checkpoint(session, checkpoint, prefix):
    """Upload a checkpoint as a model.tar.gz."""
    packed = Path("model.tar.gz")
    with tarfile.open(packed, "w:gz") as archive:
        for path in Path(checkpoint).glob("*.*"):
            archive.add(path, path.name)
    return session.upload_data(str(packed), key_prefix=prefix)


def upload_folder(session, folder, prefix):
    """Upload a folder with its subfolders, as `aws s3 cp --recursive` does."""
    s3 = boto3.client("s3")
    for path in Path(folder).rglob("*"):
        if path.is_file():
            s3.upload_file(str(path.resolve()), session.default_bucket(), f"{prefix}/{path.relative_to(folder)}")
    return f"s3://{session.default_bucket()}/{prefix}/"


def wait_until_deleted(endpoint):
    """Wait until an endpoint is deleted."""
    boto3.client("sagemaker").get_waiter("endpoint_deleted").wait(EndpointName=endpoint, WaiterConfig=QUICK)


def tell(told, endpoint):
    """Print what a client has found, and what is left of everything when its endpoint is deleted."""
    wait_until_deleted(endpoint)
    client = boto3.client("sagemaker")
    left = {
        "endpoints": [each["EndpointName"] for each in client.list_endpoints()["Endpoints"]],
        "configs": [each["EndpointConfigName"] for each in client.list_endpoint_configs()["EndpointConfigs"]],
        "models": [each["ModelName"] for each in client.list_models()["Models"]],
    }
    print()  # after the SDK's own line of progress
    print(json.dumps({**told, "left": left}))
