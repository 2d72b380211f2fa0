"""The routing example: two instances, the same load under two strategies, CloudWatch's figures of both.

Run by .venv-clients: routing.py BUCKET ARCHIVE. Prints its results as one line of JSON.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import boto3
from common import QUICK, ROLE, make_session, tell

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-inference:2.3.0-gpu-py311"
NAME = "routing"
STRATEGIES = ("RANDOM", "LEAST_OUTSTANDING_REQUESTS")
BODY = json.dumps({"inputs": "<s><|user|>What is in the image?<|end|><|assistant|>"})


def main(bucket, archive):
    session = make_session(bucket)
    sagemaker, runtime, cloudwatch = (boto3.client(each) for each in ("sagemaker", "sagemaker-runtime", "cloudwatch"))
    url = session.upload_data(archive, key_prefix="routing")
    sagemaker.create_model(
        ModelName=NAME, ExecutionRoleArn=ROLE, PrimaryContainer={"Image": IMAGE, "ModelDataUrl": url}
    )
    for strategy in STRATEGIES:
        sagemaker.create_endpoint_config(
            EndpointConfigName=strategy.replace("_", "-"),
            ProductionVariants=[
                {
                    "VariantName": "AllTraffic",
                    "ModelName": NAME,
                    "InitialInstanceCount": 2,
                    "InstanceType": "ml.g5.xlarge",
                    "RoutingConfig": {"RoutingStrategy": strategy},
                }
            ],
        )

    def invoke(_):
        answer = runtime.invoke_endpoint(EndpointName=NAME, ContentType="application/json", Body=BODY)
        answer["Body"].read()
        return answer["ResponseMetadata"]["HTTPStatusCode"]

    def read(query_id, metric, stat):
        dimensions = [{"Name": "EndpointName", "Value": NAME}, {"Name": "VariantName", "Value": "AllTraffic"}]
        metric = {"Namespace": "AWS/SageMaker", "MetricName": metric, "Dimensions": dimensions}
        return {"Id": query_id, "MetricStat": {"Metric": metric, "Period": 3600, "Stat": stat}, "ReturnData": False}

    told = {}
    for number, strategy in enumerate(STRATEGIES):
        change = sagemaker.update_endpoint if number else sagemaker.create_endpoint
        change(EndpointName=NAME, EndpointConfigName=strategy.replace("_", "-"))
        sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=NAME, WaiterConfig=QUICK)
        [variant] = sagemaker.describe_endpoint(EndpointName=NAME)["ProductionVariants"]
        with ThreadPoolExecutor(4) as pool:
            statuses = list(pool.map(invoke, range(12)))
        told[strategy] = {"statuses": statuses, "routing": variant["RoutingConfig"]}
    now = datetime.now(UTC)
    found = cloudwatch.get_metric_data(
        MetricDataQueries=[
            read("p99", "ModelLatency", "p99"),
            read("errors", "Invocation5XXErrors", "Sum"),
            read("calls", "Invocations", "Sum"),
            {"Id": "rate", "Expression": "100 * errors / calls", "Label": "errors in percent"},
            {"Id": "milliseconds", "Expression": "p99 / 1000"},
        ],
        StartTime=now - timedelta(hours=1),
        EndTime=now + timedelta(minutes=1),
    )
    told["figures"] = {each["Id"]: each["Values"] for each in found["MetricDataResults"]}
    told["labels"] = [each["Label"] for each in found["MetricDataResults"]]
    sagemaker.delete_endpoint(EndpointName=NAME)
    for strategy in STRATEGIES:
        sagemaker.delete_endpoint_config(EndpointConfigName=strategy.replace("_", "-"))
    sagemaker.delete_model(ModelName=NAME)
    tell(told, NAME)


main(*sys.argv[1:])
