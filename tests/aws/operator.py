"""Run scripts/deploy_sagemaker.py as an operator does."""

from functools import cache
from typing import Any

import pytest

from scripts.deploy_sagemaker import main
from scripts.sagemaker_deploy.account import Account
from scripts.sagemaker_deploy.progress import Watch

NAME = "llava"


class Operator:
    """Run the script as from a shell, with a clock that advances when it waits."""

    def __init__(self, aws: Any, capsys: pytest.CaptureFixture[str]) -> None:
        self.aws, self._capsys = aws, capsys
        self.now = 0.0
        self.connect: Any = cached_account
        self.out = self.err = ""

    def run(self, command: str, *arguments: str, timeout_s: float = 3600) -> int:
        def sleep(seconds: float) -> None:
            self.now += seconds

        watch = Watch(say=print, timeout_s=timeout_s, clock=lambda: self.now, sleep=sleep)
        status = main([command, "--endpoint-url", self.aws.url, *arguments], watch, self.connect)
        self.out, self.err = self._capsys.readouterr()
        return status

    def endpoint(self) -> Any:
        return self.aws.ask("sagemaker", "describe_endpoint", EndpointName=NAME)

    def config(self) -> Any:
        name = self.endpoint()["EndpointConfigName"]
        return self.aws.ask("sagemaker", "describe_endpoint_config", EndpointConfigName=name)


@cache
def cached_account(*options: str | None) -> Account:
    """Share one account among all tests, because creating boto3's clients takes longer than using them."""
    return Account(*options)
