"""Use SagemakerAsyncEndpoint as a user does; run by .venv-clients: langchain_async.py RUNTIME_URL PROMPT [S3].

S3: JSON, the arguments of boto3's S3 client. Prints the results as one line of JSON.
"""

import asyncio
import json
import sys

import boto3

from torchmoor.clients.errors import AsyncInferenceFailed, AsyncInferenceTimedOut
from torchmoor.clients.langchain import SagemakerAsyncEndpoint

LONG = {"max_new_tokens": 900, "ignore_eos": True}  # so that the client's first look comes before the answer


def refusal(call):
    try:
        call()
    except (AsyncInferenceFailed, AsyncInferenceTimedOut) as error:
        return f"{type(error).__name__}: {error} {error.output_location}"
    return "no error"


async def several(llm, prompt):
    return await asyncio.gather(*(llm.ainvoke(prompt) for _ in range(3)))


def main(address, prompt, s3="null"):
    arguments = {"endpoint_name": "llava", "endpoint_url": address, "max_delay": 0.5, "model_kwargs": {"seed": 1}}
    if given := json.loads(s3):
        arguments |= {"s3_client": boto3.client("s3", **given), "input_prefix": "s3://journals/inputs"}
    llm = SagemakerAsyncEndpoint(**arguments)
    told = {
        "whole": llm.invoke(prompt, max_new_tokens=16),
        "stopped": llm.invoke(prompt, stop=["circle"], max_new_tokens=16),
        "several": asyncio.run(several(llm, prompt)),
        "failed": refusal(lambda: llm.invoke(prompt, temperature=-1)),
        "timed_out": refusal(lambda: SagemakerAsyncEndpoint(**arguments, max_wait=1e-9).invoke(prompt, **LONG)),
    }
    print(json.dumps(told))


main(*sys.argv[1:])
