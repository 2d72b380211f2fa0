"""Runs vLLM's AsyncLLM for engine.py, alone or behind torchmoor's sessions; vLLM needs an environment of its own.

    VENV/bin/python -m benchmarks.vllm_engine_arm alone|sessions CHECKPOINT DTYPE

In both arms, scheduler and model run in a separate process. Alone, AsyncLLM gets token ids and returns text, as vLLM's
server uses it. Behind sessions, the chat service opens a session for each question and streams the answers in TGI's
form, without TorchServe.

Reads a line of JSON for each task, {"questions": [...], "num_new": 64, "is_followup": false}, and answers with one:
{"tokens": 512, "cpu_s": 1.5, "ttft_s": [...]}. cpu_s is the processor time of this process and its children. A
follow-up continues the conversations of the previous task.
"""

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from handlers.engine.vllm.start import make_arguments, open_vllm, prepare_environment, read_prompts
from handlers.settings.engine import EngineSettings
from handlers.settings.handler import HandlerSettings
from handlers.settings.model import ModelSettings
from handlers.settings.session import ChatSessionSettings
from handlers.settings.vllm import VllmSettings

ANSWERS = os.dup(1)  # vLLM prints to standard output, which becomes standard error
os.dup2(2, 1)
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
BLOCK_SIZE = 32  # positions per block of the prefix cache; the default on a CPU, 128, is longer than a question


def make_settings(dtype: str) -> HandlerSettings:
    return HandlerSettings(
        model=ModelSettings(dtype=dtype),
        session=ChatSessionSettings(kv_bytes=1 << 30),
        engine=EngineSettings(name="vllm", max_rows=16, max_context_tokens=4096),
        vllm=VllmSettings(enforce_eager=True, options={"block_size": BLOCK_SIZE}),
    )


def cpu_s() -> float:
    """Return the processor time of this process and its children so far."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Alone:
    """AsyncLLM without torchmoor."""

    def __init__(self, settings: HandlerSettings, checkpoint: Path) -> None:
        prepare_environment(settings, None, os.environ)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = make_arguments(settings, checkpoint)
        self._prompts = read_prompts(checkpoint, arguments)
        self._runner = asyncio.Runner()
        self._histories: list[list[dict[str, Any]]] = []
        self._count = 0

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

        self._llm = self._runner.run(start())
        self._prompts.max_context = self._llm.model_config.max_model_len

    def run(self, questions: list[str], num_new: int, *, is_followup: bool) -> tuple[int, list[float]]:
        if not is_followup:
            self._histories = [[] for _ in questions]
        for history, question in zip(self._histories, questions, strict=True):
            history.append({"role": "user", "content": [{"type": "text", "text": question}]})

        async def all_of_them() -> list[tuple[int, float, str]]:
            return await asyncio.gather(*(self._ask(history, num_new) for history in self._histories))

        found = self._runner.run(all_of_them())
        for history, (_, _, text) in zip(self._histories, found, strict=True):
            history.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        return sum(number for number, _, _ in found), [ttft for _, ttft, _ in found]

    async def _ask(self, history: list[dict[str, Any]], num_new: int) -> tuple[int, float, str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=num_new, temperature=0.0, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA
        )
        begin, first, text, number = time.perf_counter(), 0.0, "", 0
        self._count += 1
        prompt = TokensPrompt(prompt_token_ids=self._prompts.render(history, []))
        async for output in self._llm.generate(prompt, params, str(self._count)):
            first = first or time.perf_counter() - begin
            text += output.outputs[0].text
            number += len(output.outputs[0].token_ids)
        return number, first, text


class Sessions:
    """AsyncLLM behind the chat service."""

    def __init__(self, settings: HandlerSettings, checkpoint: Path) -> None:
        from handlers.chat.images.loader import ImageLoader
        from handlers.chat.service import ChatService
        from handlers.chat.sessions.session_id_minter import SessionIdMinter

        prompts, engine = open_vllm(settings, checkpoint, None)
        ids = SessionIdMinter({"k0": b"k" * 32}, "bench")
        self._service = ChatService(settings, prompts, engine, ids, ImageLoader(settings.intake))
        engine.start()
        self._sessions: list[str] = []

    def run(self, questions: list[str], num_new: int, *, is_followup: bool) -> tuple[int, list[float]]:
        if not is_followup:
            self._sessions = [
                json.loads(Request(self._service, {"requestType": "NEW_SESSION"}).read())["session_id"]
                for _ in questions
            ]
        asked = [
            Request(
                self._service,
                {
                    "type": "send_text_prompt",
                    "session_id": session,
                    "prompt_text": question,
                    "stream": True,
                    "parameters": {"max_new_tokens": num_new, "details": True},
                },
                {"accept": "text/event-stream"},
            )
            for session, question in zip(self._sessions, questions, strict=True)
        ]
        with ThreadPoolExecutor(len(asked)) as threads:
            bodies = list(threads.map(Request.read, asked))
        ends = [json.loads(body.rstrip().rpartition(b"\n\n")[2].removeprefix(b"data:")) for body in bodies]
        return sum(end["details"]["generated_tokens"] for end in ends), [each.ttft_s for each in asked]


class Request:
    """A request to the chat service; reads its reply as the pump does."""

    def __init__(self, service: Any, body: Any, headers: dict[str, str] | None = None) -> None:
        from handlers.requests.incoming import Incoming
        from handlers.requests.reply import PendingReply

        self._news = threading.Event()
        self._reply = PendingReply(self._news.set)
        self._begun = time.perf_counter()
        self.ttft_s = 0.0
        service.start(Incoming(headers or {}, json.dumps(body).encode()), self._reply)

    def read(self) -> bytes:
        """Wait for the end of the reply, and return its body."""
        from handlers.requests.reply import ReplyPieces, WholeReply

        body = b""
        while True:
            self._news.wait()
            self._news.clear()
            while self._reply.has_news():
                news = self._reply.take(1 << 20)
                if isinstance(news, WholeReply):
                    return bytes(news.body)
                if isinstance(news, ReplyPieces):
                    self.ttft_s = self.ttft_s or time.perf_counter() - self._begun
                    body += news.data
                    if news.is_end:
                        return body


def main() -> None:
    kind, checkpoint, dtype = sys.argv[1:]
    arm = {"alone": Alone, "sessions": Sessions}[kind](make_settings(dtype), Path(checkpoint))
    _answer({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        begin = cpu_s()
        tokens, ttft_s = arm.run(task["questions"], task["num_new"], is_followup=task["is_followup"])
        _answer({"tokens": tokens, "cpu_s": cpu_s() - begin, "ttft_s": ttft_s})


def _answer(value: dict[str, object]) -> None:
    os.write(ANSWERS, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
