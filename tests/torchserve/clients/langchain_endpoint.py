"""Use LangChain's SagemakerEndpoint as a user does; run by .venv-clients: langchain_endpoint.py RUNTIME_URL PROMPT.

Prints the results as one line of JSON.
"""

import json
import sys

from langchain_aws import SagemakerEndpoint
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler


class Whole(LLMContentHandler):
    """A content handler for TGI's form, as in most examples."""

    content_type = accepts = "application/json"

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs}).encode()

    def transform_output(self, output):
        return json.loads(output.read())[0]["generated_text"]


class Streamed(Whole):
    """A content handler for TGI's events, one line at a time."""

    def transform_input(self, prompt, model_kwargs):
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, "stream": True}).encode()

    def transform_output(self, output):
        return json.loads(output[output.find(b"{") :])["token"]["text"] if b"{" in output else ""


def main(address, prompt):
    arguments = {
        "endpoint_name": "llava",
        "endpoint_url": address,
        "region_name": "us-east-1",
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
        "model_kwargs": {"max_new_tokens": 32},
    }
    whole = SagemakerEndpoint(content_handler=Whole(), **arguments)
    streamed = SagemakerEndpoint(content_handler=Streamed(), streaming=True, **arguments)
    print(json.dumps({"whole": whole.invoke(prompt), "pieces": list(streamed.stream(prompt))}))


main(*sys.argv[1:])
