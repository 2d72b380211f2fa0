"""Use the SDK's AsyncPredictor as a user does; run by .venv-clients: sagemaker_async_predictor.py RUNTIME_URL S3.

S3: JSON, the arguments of boto3's S3 client. Prints the results as one line of JSON.
"""

import json
import os
import sys
import time
import warnings

import boto3

warnings.simplefilter("ignore")  # the SDK warns about its next version

from sagemaker.async_inference.waiter_config import WaiterConfig  # noqa: E402
from sagemaker.base_deserializers import JSONDeserializer, StringDeserializer  # noqa: E402
from sagemaker.base_serializers import JSONSerializer  # noqa: E402
from sagemaker.exceptions import AsyncInferenceModelError, ObjectNotExistedError  # noqa: E402
from sagemaker.predictor import Predictor  # noqa: E402
from sagemaker.predictor_async import AsyncPredictor  # noqa: E402
from sagemaker.session import Session  # noqa: E402

PATIENCE = WaiterConfig(delay=1, max_attempts=120)


def polled(response):
    """Poll for the result, as a user does who does not want to block."""
    for _ in range(600):
        try:
            return response.get_result()
        except ObjectNotExistedError:
            time.sleep(0.1)
    raise TimeoutError(response.output_path)


def main(address, s3):
    mine = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    session = Session(
        boto_session=boto3.Session(**mine),
        sagemaker_client=boto3.client("sagemaker", endpoint_url="http://127.0.0.1:9", **mine),  # never called
        sagemaker_runtime_client=boto3.client("sagemaker-runtime", endpoint_url=address, **mine),
        default_bucket="none",
    )
    session.s3_client = boto3.client("s3", **json.loads(s3))

    def make(deserializer):
        return AsyncPredictor(Predictor("llava", session, serializer=JSONSerializer(), deserializer=deserializer))

    predictor = make(JSONDeserializer())
    raw = {"inputs": "<s><|user|>What is in the image?<|end|><|assistant|>", "parameters": {"max_new_tokens": 8}}
    json_input = {"ContentType": "application/json"}

    submitted = predictor.predict_async(
        raw, input_path="s3://journals/inputs/a.json", initial_args=json_input, inference_id="inference-1"
    )
    waited = predictor.predict_async(raw, input_path="s3://journals/inputs/b.json", initial_args=json_input)
    broken = make(StringDeserializer()).predict_async(  # a failure object is text
        {"type": "nonsense"}, input_path="s3://journals/inputs/c.json", initial_args=json_input
    )
    told = {
        "output": submitted.output_path,
        "failure": submitted.failure_path,
        "polled": polled(submitted),
        "waited": waited.get_result(PATIENCE),
        "predicted": predictor.predict(
            raw, input_path="s3://journals/inputs/d.json", initial_args=json_input, waiter_config=PATIENCE
        ),
    }
    try:
        told["broken"] = broken.get_result(PATIENCE)
    except AsyncInferenceModelError as error:
        told["broken"] = str(error)
    print(json.dumps(told), flush=True)
    os._exit(0)  # the SDK leaves threads that poll for the missing object until their own limit


main(*sys.argv[1:])
