"""Implements the arms of followup.py: clients of the fleet, and a handler like that of the AWS sample."""

import base64
import http.client
import io
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.fleet import make_runtime_client

NEW_TOKENS = 16
PARAMETERS = {"max_new_tokens": NEW_TOKENS}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, the time to its first piece, and its receipt."""

    text: str
    first_ms: float
    tier: str
    num_prefilled: int
    num_context: int
    is_rebuilt: bool
    instance: str


class Client:
    """Sends requests with boto3, on one kept connection, and measures the time to the first piece of an answer."""

    def __init__(self, runtime: str) -> None:
        self._client = make_runtime_client(runtime)

    def open(self, image: bytes) -> str:
        """Open a session about an image and return its id."""
        opened = self._invoke("NEW_SESSION", {"type": "start_session", "image": base64.b64encode(image).decode()})
        session: str = opened["NewSessionId"].partition(";")[0]
        return session

    def ask(self, session: str, question: str) -> Answer:
        return self._stream(next_question(question), {"SessionId": session})

    def ask_stateless(self, image: bytes, texts: list[str]) -> Answer:
        return self._stream(whole_conversation(image, texts), {})

    def close(self, session: str) -> None:
        self._invoke(session, {"type": "close_session"})

    def _stream(self, body: dict[str, Any], members: dict[str, str]) -> Answer:
        encoded = json.dumps(body)
        begin = time.perf_counter()
        answer = self._client.invoke_endpoint_with_response_stream(
            EndpointName="llava",
            ContentType="application/json",
            Accept="text/event-stream",
            Body=encoded,
            **members,
        )
        parts, first_ms = [], 0.0
        for event in answer["Body"]:
            first_ms = first_ms or (time.perf_counter() - begin) * 1000
            parts.append(event["PayloadPart"]["Bytes"])
        return _answer(first_ms, b"".join(parts), answer["ResponseMetadata"]["HTTPHeaders"])

    def _invoke(self, session: str, body: dict[str, Any]) -> Any:
        return self._client.invoke_endpoint(
            EndpointName="llava", SessionId=session, ContentType="application/json", Body=json.dumps(body)
        )


class ResponsesClient:
    """Uses OpenAI's Responses API: the second question names the first one's response."""

    def __init__(self, runtime: str) -> None:
        self._host = runtime.removeprefix("http://")

    def ask(self, image: bytes, first: str, second: str) -> Answer:
        """Return the answer to the second question. Deletes both responses, and so their session."""
        url = "data:image/jpeg;base64," + base64.b64encode(image).decode()
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": first}]
        opened, _ = self._create([{"role": "user", "content": parts}])
        answered, answer = self._create(second, previous_response_id=opened)
        for response in (opened, answered):
            self._request("DELETE", f"/v1/responses/{response}")[0].close()
        return answer

    def _create(self, inputs: Any, **fields: str) -> tuple[str, Answer]:
        """Create a response; return its id and its answer."""
        body = {"model": "llava", "input": inputs, "stream": True, "max_output_tokens": NEW_TOKENS, "temperature": 0}
        begin = time.perf_counter()
        connection, response = self._request("POST", "/v1/responses", json.dumps({**body, **fields}))
        streamed = bytearray()
        while b"response.output_text.delta" not in streamed:
            part = response.read1()
            if not part:
                raise RuntimeError(f"{response.status} {bytes(streamed)!r}")
            streamed += part
        first_ms = (time.perf_counter() - begin) * 1000
        streamed += response.read()
        connection.close()
        headers = {name.lower(): value for name, value in response.getheaders()}
        answer = _answer(first_ms, bytes(streamed), headers)
        head, _, _ = bytes(streamed).partition(b"\n\n")  # the first event contains the new response
        return json.loads(head.partition(b"data: ")[2])["response"]["id"], answer

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, timeout=600)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status} {response.read()!r}")
        return connection, response


def whole_conversation(image: bytes, texts: list[str]) -> dict[str, Any]:
    """Return the body of a stateless request. texts: questions and answers in turn; the last is the new question."""
    messages = _messages(texts)
    url = "data:image/jpeg;base64," + base64.b64encode(image).decode()
    messages[0]["content"].insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": messages, "stream": True, "max_tokens": NEW_TOKENS, "temperature": 0}


def next_question(question: str) -> dict[str, Any]:
    """Return the body of a session's next question."""
    return {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": PARAMETERS}


class InstanceClient:
    """A separate caller that sends requests to an instance directly.

    Workers share caches between requests of the same caller only, so this one finds only what it has cached itself.
    """

    def __init__(self, principal: str) -> None:
        self._principal = principal

    def open(self, instance: Mapping[str, Any], image: bytes) -> str:
        body = {"type": "start_session", "image": base64.b64encode(image).decode()}
        _, streamed, _ = self._post(instance, body, "NEW_SESSION")
        session: str = json.loads(streamed)["session_id"]
        return session

    def ask(self, instance: Mapping[str, Any], body: dict[str, Any], session: str | None = None) -> Answer:
        """Send a request. session: None for a body that contains the conversation."""
        return _answer(*self._post(instance, body, session))

    def close(self, instance: Mapping[str, Any], session: str) -> None:
        self._post(instance, {"type": "close_session"}, session)

    def _post(
        self, instance: Mapping[str, Any], body: dict[str, Any], session: str | None
    ) -> tuple[float, bytes, dict[str, str]]:
        """Return the milliseconds to the first byte of the answer, its body and its header fields."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "X-Torchmoor-Endpoint": instance["endpoint"],
            "X-Torchmoor-Principal": self._principal,
        }
        if session is not None:
            headers["X-Amzn-SageMaker-Session-Id"] = session
        encoded = json.dumps(body)
        connection = http.client.HTTPConnection(instance["host"], instance["port"], timeout=600)
        try:
            begin = time.perf_counter()
            connection.request("POST", f"/predictions/{instance['model']}", encoded, headers)
            response = connection.getresponse()
            first = response.read(1)
            first_ms = (time.perf_counter() - begin) * 1000
            streamed = first + response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {streamed!r}")
            return first_ms, streamed, {name.lower(): value for name, value in response.getheaders()}
        finally:
            connection.close()


def _messages(texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": text}]}
        for i, text in enumerate(texts)
    ]


def _answer(first_ms: float, streamed: bytes, headers: Mapping[str, str]) -> Answer:
    return Answer(
        _text(streamed),
        first_ms,
        headers["x-torchmoor-cache-tier"],
        int(headers["x-torchmoor-prefill-tokens"]),
        int(headers["x-torchmoor-context-tokens"]),
        "x-torchmoor-rebuilt-events" in headers,
        headers.get("x-torchmoor-instance", ""),
    )


def _text(streamed: bytes) -> str:
    """Return the text of an event stream in the form of TGI, OpenAI's chat completions or OpenAI's responses."""
    events = [event.partition("data:")[2].strip() for event in streamed.decode().split("\n\n") if event]
    values = [json.loads(data) for data in events if data != "[DONE]"]
    deltas = [value["delta"] for value in values if value.get("type") == "response.output_text.delta"]
    if deltas:
        return "".join(deltas)
    if "generated_text" in values[-1]:
        text: str = values[-1]["generated_text"]
        return text
    return "".join(choice["delta"].get("content", "") for value in values for choice in value["choices"])


class PixelCache:
    """A handler like that of the AWS sample, which keeps a session's pixel values and computes the rest at each turn.

    It runs transformers' model in this process, so its baseline is a stateless handler that does the same.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(checkpoint)
        self._model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def measure(self, image: bytes, texts: list[str]) -> tuple[float, float]:
        """Return the milliseconds to the first token of the next answer: with kept pixel values, and stateless."""
        pixels = self._pixels(image)
        begin = time.perf_counter()
        self._first_token(pixels, texts)
        kept = time.perf_counter()
        self._first_token(self._pixels(image), texts)
        return (kept - begin) * 1000, (time.perf_counter() - kept) * 1000

    def _pixels(self, image: bytes) -> Any:
        decoded = Image.open(io.BytesIO(image)).convert("RGB")
        return self._processor.image_processor(images=[decoded], return_tensors="pt")["pixel_values"]

    @torch.inference_mode()
    def _first_token(self, pixels: Any, texts: list[str]) -> None:
        messages = _messages(texts)
        messages[0]["content"].insert(0, {"type": "image"})
        text = self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        config = self._model.config
        expanded = [t for i in ids for t in [i] * (config.image_seq_length if i == config.image_token_id else 1)]
        inputs = torch.tensor([expanded])
        self._model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            pixel_values=pixels,
            max_new_tokens=1,
            do_sample=False,
        )
