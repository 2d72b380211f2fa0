"""The example of many models: Triton's image in Mode MultiModel, copies of one archive, TargetModel.

Run by .venv-clients: many_models.py BUCKET ARCHIVE. Prints its results as one line of JSON.
"""

import json
import sys

import boto3
from common import QUICK, ROLE, make_session, tell
from sagemaker.multidatamodel import MultiDataModel

IMAGE = "785573368785.dkr.ecr.us-east-1.amazonaws.com/sagemaker-tritonserver:22.12-py3"
NAME, COPIES = "bert-models", 5


def main(bucket, archive):
    session = make_session(bucket)
    sagemaker, runtime, s3 = (boto3.client(each) for each in ("sagemaker", "sagemaker-runtime", "s3"))
    for number in range(COPIES):
        s3.upload_file(archive, bucket, f"mme/bert-{number}.tar.gz")
    container = {"Image": IMAGE, "ModelDataUrl": f"s3://{bucket}/mme/", "Mode": "MultiModel"}
    sagemaker.create_model(ModelName=NAME, ExecutionRoleArn=ROLE, PrimaryContainer=container)
    sagemaker.create_endpoint_config(
        EndpointConfigName=NAME,
        ProductionVariants=[
            {
                "InstanceType": "ml.g5.xlarge",
                "InitialVariantWeight": 1,
                "InitialInstanceCount": 1,
                "ModelName": NAME,
                "VariantName": "AllTraffic",
            }
        ],
    )
    sagemaker.create_endpoint(EndpointName=NAME, EndpointConfigName=NAME)
    sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=NAME, WaiterConfig=QUICK)

    ids = {"shape": [1, 8], "datatype": "INT32"}
    payload = {
        "inputs": [
            {"name": "INPUT__0", "data": [list(range(8))], **ids},
            {"name": "INPUT__1", "data": [[1] * 8], **ids},
        ]
    }

    def ask(target):
        answer = runtime.invoke_endpoint(
            EndpointName=NAME, ContentType="application/octet-stream", Body=json.dumps(payload), TargetModel=target
        )
        return json.loads(answer["Body"].read())["outputs"]

    told = {"outputs": [ask(f"bert-{number}.tar.gz") for number in range(COPIES)]}
    models = MultiDataModel(
        name=NAME, model_data_prefix=f"s3://{bucket}/mme/", image_uri=IMAGE, role=ROLE, sagemaker_session=session
    )
    models.add_model(f"s3://{bucket}/mme/bert-0.tar.gz", "bert-new.tar.gz")
    told["listed"] = sorted(models.list_models())
    told["added"] = ask("bert-new.tar.gz")
    sagemaker.delete_endpoint(EndpointName=NAME)
    sagemaker.delete_endpoint_config(EndpointConfigName=NAME)
    sagemaker.delete_model(ModelName=NAME)
    tell(told, NAME)


main(*sys.argv[1:])
