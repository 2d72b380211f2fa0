"""Deploy, invoke and delete the image with the SageMaker Python SDK's local mode.

local_mode.py IMAGE MODEL_DATA PORT FOLDER QUESTION_PICTURE; prints a line of JSON.
"""

import json
import sys
from pathlib import Path

from sagemaker.deserializers import JSONDeserializer
from sagemaker.local import LocalSession, entities
from sagemaker.model import Model
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer

entities.HEALTH_CHECK_TIMEOUT_LIMIT = 600  # seconds until the container is healthy; 120 is too short on a busy machine


def main(image: str, model_data: str, port: str, folder: str, picture: str) -> None:
    session = LocalSession()
    session.config = {"local": {"serving_port": int(port), "container_root": folder}}
    model = Model(
        image_uri=image,
        model_data=model_data,
        role="arn:aws:iam::000000000000:role/nobody",
        sagemaker_session=session,
        predictor_cls=Predictor,
        env={"SAGEMAKER_MODEL_SERVER_TIMEOUT": "120"},
    )
    predictor = model.deploy(initial_instance_count=1, instance_type="local")
    try:
        predictor.serializer, predictor.deserializer = JSONSerializer(), JSONDeserializer()
        opened = predictor.predict({"type": "start_session", "path": Path(picture).read_text()})
        question = {"type": "send_text_prompt", "prompt_text": "What color is the circle?", **opened}
        told = {"opened": opened, "asked": predictor.predict(question)}
        told["closed"] = predictor.predict({"type": "close_session", **opened})
    finally:
        predictor.delete_endpoint()
    print(json.dumps(told))


main(*sys.argv[1:])
