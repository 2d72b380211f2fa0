"""Use the SageMaker Python SDK as a user does; run by .venv-clients: sagemaker_predictor.py RUNTIME_URL PICTURE.

Prints the results as one line of JSON.
"""

import base64
import json
import sys
import warnings
from pathlib import Path

import boto3
from botocore.exceptions import ClientError

warnings.simplefilter("ignore")  # the SDK warns about its next version

from sagemaker.base_deserializers import JSONDeserializer  # noqa: E402
from sagemaker.base_serializers import JSONSerializer  # noqa: E402
from sagemaker.iterators import LineIterator  # noqa: E402
from sagemaker.predictor import Predictor  # noqa: E402
from sagemaker.session import Session  # noqa: E402


def main(address, picture):
    arguments = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    session = Session(
        boto_session=boto3.Session(**arguments),
        sagemaker_client=boto3.client("sagemaker", endpoint_url="http://127.0.0.1:9", **arguments),  # never called
        sagemaker_runtime_client=boto3.client("sagemaker-runtime", endpoint_url=address, **arguments),
        default_bucket="none",
    )
    predictor = Predictor("llava", session, serializer=JSONSerializer(), deserializer=JSONDeserializer())
    image = base64.b64encode(Path(picture).read_bytes()).decode()
    ask = {"type": "send_text_prompt", "prompt_text": "What color is the circle?"}
    raw = {"inputs": f"<s><|user|>![](data:image/png;base64,{image})What color is the circle?<|end|><|assistant|>"}

    def refusal(call):
        try:
            call()
        except ClientError as error:
            return f"{error.response['Error']['Code']}: {error.response['Error']['Message']}"
        return "no error"

    opened = predictor.predict({"type": "start_session", "image": image}, initial_args={"SessionId": "NEW_SESSION"})
    mine = {"SessionId": opened["session_id"]}
    told = {
        "opened": opened["session_id"],
        "asked": predictor.predict(
            ask, initial_args=mine, target_variant="AllTraffic", inference_id="inference-1", custom_attributes="mine"
        ),
        "bytes": b"".join(
            predictor.predict_stream(
                {**ask, "prompt_text": "What shape is this?", "stream": True},
                initial_args=mine,
                target_variant="AllTraffic",
                inference_id="inference-2",
                custom_attributes="mine",
            )
        ).decode(),
        "lines": [line.decode() for line in predictor.predict_stream({**raw, "stream": True}, iterator=LineIterator)],
        "whole": predictor.predict(raw),
        "target_model": refusal(lambda: predictor.predict(ask, target_model="model-1.tar.gz")),
        "variant": refusal(lambda: predictor.predict(ask, target_variant="Other")),
        "component": refusal(lambda: predictor.predict(ask, component_name="component-1")),
        "hostname": refusal(lambda: predictor.predict_stream(ask, target_container_hostname="second")),
        "model_error": refusal(lambda: predictor.predict({"type": "nonsense"})),
        "closed": predictor.predict({"type": "close_session"}, initial_args=mine),
        "after": refusal(lambda: predictor.predict(ask, initial_args=mine)),
    }
    print(json.dumps(told))


main(*sys.argv[1:])
