"""The stateful sample: an uncompressed archive in S3, the sample's environment, sessions, two instances.

Run by .venv-clients: sticky.py BUCKET ARCHIVE_FOLDER. Prints its results as one line of JSON.
"""

import json
import sys

import boto3
from common import ROLE, make_session, tell, upload_folder
from sagemaker.model import Model
from sagemaker.predictor import Predictor

IMAGE = "000000000000.dkr.ecr.us-east-1.amazonaws.com/llava-stateful:1.0"
SEQUENCE_ID, SEQUENCE_END = "X-Amzn-SageMaker-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"
NAME = "llava-sm"


def main(bucket, archive):
    session = make_session(bucket)
    runtime = boto3.client("sagemaker-runtime")
    model = Model(
        name=NAME,
        model_data={
            "S3DataSource": {
                "S3Uri": upload_folder(session, archive, f"torchserve/{NAME}"),
                "S3DataType": "S3Prefix",
                "CompressionType": "None",
            }
        },
        image_uri=IMAGE,
        role=ROLE,
        sagemaker_session=session,
        env={
            "TS_CONFIG_FILE": "/home/model-server/config.properties",
            "TS_DISABLE_TOKEN_AUTHORIZATION": "true",
            "TS_HEADER_KEY_SEQUENCE_ID": SEQUENCE_ID,
            "TS_REQUEST_SEQUENCE_ID": SEQUENCE_ID,
            "TS_HEADER_KEY_SEQUENCE_END": SEQUENCE_END,
            "TS_REQUEST_SEQUENCE_END": SEQUENCE_END,
            "TS_DISABLE_SYSTEM_METRICS": "false",
        },
    )
    model.deploy(
        initial_instance_count=2,
        instance_type="ml.p4d.24xlarge",
        endpoint_name=NAME,
        model_data_download_timeout=3600,
        container_startup_health_check_timeout=3600,
    )
    predictor = Predictor(endpoint_name=model.endpoint_name, sagemaker_session=session)

    def send(session_id, **body):
        answer = runtime.invoke_endpoint(
            EndpointName=predictor.endpoint_name,
            Body=json.dumps(body),
            ContentType="application/json",
            SessionId=session_id,
        )
        return json.loads(answer["Body"].readlines()[0])

    opened = [send("NEW_SESSION", type="start_session")["session_id"] for _ in range(4)]
    totals = [[send(each, type="add", number=number)["total"] for each in opened] for number in (1, 2)]
    closed = [send(each, type="close_session") for each in opened]
    session.delete_endpoint(NAME)
    session.delete_endpoint_config(NAME)
    model.delete_model()
    tell({"opened": opened, "totals": totals, "closed": closed}, NAME)


main(*sys.argv[1:])
