"""Deploy deploy/sagemaker/template.yaml as a stack of moto's."""

from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).parents[2] / "deploy" / "sagemaker" / "template.yaml"
ROLE = TEMPLATE.with_name("role.yaml")
ASYNCHRONOUS = {"Invocation": "Asynchronous", "MinCapacity": "0", "MaxCapacity": "2"}


def read_document(found: Any) -> Any:
    """Read a policy from a stack; moto formats it as a Python literal, AWS as JSON, and YAML reads both."""
    return yaml.safe_load(found) if isinstance(found, str) else found


class Stack:
    """One stack of the template."""

    def __init__(self, aws: Any) -> None:
        self.aws = aws
        # moto knows only the older status, which differs for a stack that could not be created.
        self._template = TEMPLATE.read_text().replace("RetainExceptOnCreate", "Retain")

    def put(self, operation: str, **parameters: str) -> None:
        required = {"ImageTag": "1", "ModelBucket": "models", "ModelKey": "llava.tar.gz"}
        given = {**required, "InstanceType": "ml.g4dn.xlarge", **parameters}  # moto knows no newer types
        self.aws.ask(
            "cloudformation",
            f"{operation}_stack",
            StackName="vision",
            TemplateBody=self._template,
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
            Capabilities=["CAPABILITY_IAM"],
        )

    def delete(self) -> None:
        self.aws.ask("cloudformation", "delete_stack", StackName="vision")

    def outputs(self) -> dict[str, str]:
        [stack] = self.aws.ask("cloudformation", "describe_stacks", StackName="vision")["Stacks"]
        return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}

    def config(self) -> Any:
        endpoint = self.aws.ask("sagemaker", "describe_endpoint", EndpointName="llava")
        assert endpoint["EndpointStatus"] == "InService"
        name = endpoint["EndpointConfigName"]
        return self.aws.ask("sagemaker", "describe_endpoint_config", EndpointConfigName=name)

    def model(self) -> Any:
        name = self.config()["ProductionVariants"][0]["ModelName"]
        return self.aws.ask("sagemaker", "describe_model", ModelName=name)
