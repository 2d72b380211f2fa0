"""The streaming examples: TGI's image through the SDK, and LMI's of version 0.26 through boto3.

Run by .venv-clients: streaming.py BUCKET CHECKPOINT. Prints its results as one line of JSON.
"""

import io
import json
import sys
import tarfile

import boto3
from common import (
    QUICK,
    ROLE,
    TGI_VARIABLES,
    make_session,
    tell,
    upload_checkpoint,
    upload_folder,
    wait_until_deleted,
)
from sagemaker import image_uris
from sagemaker.enums import RoutingStrategy
from sagemaker.huggingface import HuggingFaceModel, get_huggingface_llm_image_uri

# The file as it is published, but for the checkpoint; without an output_formatter, and for four GPUs.
PROPERTIES = """engine = MPI
option.entryPoint=djl_python.huggingface
option.tensor_parallel_degree=4
option.low_cpu_mem_usage=TRUE
option.rolling_batch=lmi-dist
option.max_rolling_batch_size=64
option.model_loading_timeout=900
option.model_id={model_id}
option.paged_attention=true
"""
# So long that a busy machine does not send it in one part, and within the MAX_TOTAL_TOKENS of TGI_VARIABLES.
PARAMETERS = {"max_new_tokens": 230, "ignore_eos": True}
BODY = {"inputs": "<s><|user|>What is in the image?<|end|><|assistant|>", "parameters": PARAMETERS}


def read_stream(endpoint, body):
    """Return the parts of a stream."""
    answer = boto3.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName=endpoint, Body=json.dumps(body), ContentType="application/json"
    )
    return [event["PayloadPart"]["Bytes"].decode() for event in answer["Body"]]


def tgi(session, checkpoint):
    """Deploy, ask and delete with the SDK. Returns the stream's parts."""
    model = HuggingFaceModel(
        role=ROLE,
        image_uri=get_huggingface_llm_image_uri("huggingface", version="2.0.2"),
        model_data=upload_checkpoint(session, checkpoint, "tgi"),
        env={**TGI_VARIABLES, "MAX_BATCH_TOTAL_TOKENS": json.dumps(2048)},
        sagemaker_session=session,
    )
    predictor = model.deploy(
        endpoint_name="tgi-streaming",
        initial_instance_count=1,
        instance_type="ml.g5.12xlarge",
        container_startup_health_check_timeout=300,
        routing_config={"RoutingStrategy": RoutingStrategy.LEAST_OUTSTANDING_REQUESTS},
    )
    whole = predictor.predict(BODY)
    parts = read_stream("tgi-streaming", {**BODY, "stream": True})
    predictor.delete_model()
    predictor.delete_endpoint()
    return whole, parts


def lmi(session, checkpoint):
    """Create, ask and delete with boto3. Returns the stream's parts."""
    sagemaker = boto3.client("sagemaker")
    weights = upload_folder(session, checkpoint, "lmi/weights").rstrip("/")  # as the SDK's upload_data returns it
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:  # a folder, not the file alone
        content = PROPERTIES.format(model_id=weights).encode()
        member = tarfile.TarInfo("chat_model/serving.properties")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    packed.seek(0)
    session.s3_client = boto3.client("s3")
    session.s3_client.upload_fileobj(packed, session.default_bucket(), "lmi/code/model.tar.gz")
    image = image_uris.retrieve(framework="djl-deepspeed", region="us-east-1", version="0.26.0")
    sagemaker.create_model(
        ModelName="lmi-streaming",
        ExecutionRoleArn=ROLE,
        PrimaryContainer={
            "Image": image,
            "ModelDataUrl": f"s3://{session.default_bucket()}/lmi/code/model.tar.gz",
            "Environment": {"MODEL_LOADING_TIMEOUT": "3600"},
        },
    )
    sagemaker.create_endpoint_config(
        EndpointConfigName="lmi-streaming",
        ProductionVariants=[
            {
                "VariantName": "variant1",
                "ModelName": "lmi-streaming",
                "InstanceType": "ml.g5.12xlarge",
                "InitialInstanceCount": 1,
                "ModelDataDownloadTimeoutInSeconds": 3600,
                "ContainerStartupHealthCheckTimeoutInSeconds": 3600,
            }
        ],
    )
    sagemaker.create_endpoint(EndpointName="lmi-streaming", EndpointConfigName="lmi-streaming")
    sagemaker.get_waiter("endpoint_in_service").wait(EndpointName="lmi-streaming", WaiterConfig=QUICK)
    parts = read_stream("lmi-streaming", BODY)
    sagemaker.delete_endpoint(EndpointName="lmi-streaming")
    sagemaker.delete_endpoint_config(EndpointConfigName="lmi-streaming")
    sagemaker.delete_model(ModelName="lmi-streaming")
    wait_until_deleted("lmi-streaming")
    return parts


def main(bucket, checkpoint):
    session = make_session(bucket)
    told = {"lmi": lmi(session, checkpoint)}
    told["whole"], told["tgi"] = tgi(session, checkpoint)
    tell(told, "tgi-streaming")


main(*sys.argv[1:])
