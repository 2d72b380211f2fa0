"""The asynchronous example: the SDK's AsyncInferenceConfig and predictor, the published policy, LangChain.

Run by .venv-clients: asynchronous.py BUCKET CHECKPOINT. Prints its results as one line of JSON.
"""

import sys

import boto3
from common import ROLE, TGI_VARIABLES, make_session, tell, upload_checkpoint
from sagemaker.async_inference import AsyncInferenceConfig
from sagemaker.async_inference.waiter_config import WaiterConfig
from sagemaker.huggingface import HuggingFaceModel, get_huggingface_llm_image_uri

from torchmoor.clients.langchain import SagemakerAsyncEndpoint

NAME = "async-llm"
PATIENCE = WaiterConfig(delay=1, max_attempts=120)
PROMPT = "<s><|user|>What is in the image?<|end|><|assistant|>"


def main(bucket, checkpoint):
    session = make_session(bucket)
    model = HuggingFaceModel(
        role=ROLE,
        image_uri=get_huggingface_llm_image_uri("huggingface", version="0.8.2"),
        model_data=upload_checkpoint(session, checkpoint, "async"),
        env=TGI_VARIABLES,
        sagemaker_session=session,
    )
    predictor = model.deploy(
        endpoint_name=NAME,
        initial_instance_count=1,
        instance_type="ml.g5.12xlarge",
        container_startup_health_check_timeout=300,
        async_inference_config=AsyncInferenceConfig(
            output_path=f"s3://{bucket}/async/output", max_concurrent_invocations_per_instance=10
        ),
    )
    scaling = boto3.client("application-autoscaling")
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{NAME}/variant/AllTraffic",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }
    scaling.register_scalable_target(**target, MinCapacity=0, MaxCapacity=1)
    scaling.put_scaling_policy(
        PolicyName="Invocations-ScalingPolicy",
        **target,
        PolicyType="TargetTrackingScaling",
        TargetTrackingScalingPolicyConfiguration={
            "TargetValue": 5.0,
            "CustomizedMetricSpecification": {
                "MetricName": "ApproximateBacklogSizePerInstance",
                "Namespace": "AWS/SageMaker",
                "Dimensions": [{"Name": "EndpointName", "Value": NAME}],
                "Statistic": "Average",
            },
            "ScaleInCooldown": 600,
            "ScaleOutCooldown": 300,
        },
    )
    request = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}
    waited = predictor.predict_async(request, input_path=f"s3://{bucket}/async/input/a.json")
    llm = SagemakerAsyncEndpoint(
        endpoint_name=NAME,
        input_prefix=f"s3://{bucket}/async/input",
        model_kwargs={"max_new_tokens": 8},
        max_delay=1,
    )
    told = {
        "output": waited.output_path,
        "result": waited.get_result(PATIENCE),
        "langchain": llm.invoke(PROMPT),
        "policies": scaling.describe_scaling_policies(**target)["ScalingPolicies"][0]["PolicyName"],
    }
    predictor.delete_model()
    predictor.delete_endpoint()
    tell(told, NAME)


main(*sys.argv[1:])
