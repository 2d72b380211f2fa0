"""Implements the arms of engine.py. Each generates greedy answers to the same prompts and measures their cost."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.fleet import Fleet, Spent, make_runtime_client
from benchmarks.report import ROOT
from benchmarks.stepped_engine import NO_DEADLINE
from handlers.engine.builtin.chat_engine import DEFAULT_CPU_KV_BYTES, make_engine
from handlers.engine.builtin.kv_cache import SequenceCache
from handlers.engine.builtin.sequence import TokenSequence
from handlers.engine.contract import AnswerRequest, SamplingParams, TokenEvent
from handlers.errors import TurnTimedOut
from handlers.models.loader import load_model
from handlers.settings.engine import EngineSettings

MAX_STREAM_TOKENS = 1000  # of a stream that runs until a long prompt is computed; the KV cache has room for eight
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Answers:
    """The token ids of each prompt's answer, and the processor time of all answers."""

    tokens: list[Ids]
    cpu_s: float

    @property
    def cpu_token_ms(self) -> float:
        return self.cpu_s * 1000 / sum(len(ids) for ids in self.tokens)


class Sequential:
    """transformers' `generate`, one prompt after the other: a handler without an engine."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()

    def generate(self, prompts: Sequence[Ids], num_new: int) -> Answers:
        begin = time.process_time()
        tokens = [self._generate(prompt, num_new) for prompt in prompts]
        return Answers(tokens, time.process_time() - begin)

    @torch.inference_mode()
    def _generate(self, prompt: Ids, num_new: int) -> Ids:
        ids = torch.tensor([prompt])
        found = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
        tokens: Ids = found[0, len(prompt) :].tolist()
        return tokens


class TransformersManager:
    """transformers' continuous batching, with the model of the sequential arm.

    Its cache has the size that the prompts need; by default it would take all free memory.
    """

    PAGE = 32  # positions

    def __init__(self, sequential: Sequential) -> None:
        self._model = sequential.model

    def generate(self, prompts: Sequence[Ids], num_new: int) -> Answers:
        eos = self._model.generation_config.eos_token_id
        settings = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=eos, pad_token_id=0)
        num_pages = sum(-(-(len(prompt) + num_new) // self.PAGE) for prompt in prompts)
        memory = ContinuousBatchingConfig(num_blocks=num_pages, page_size=self.PAGE, max_batch_tokens=512)
        begin = time.process_time()
        found = self._model.generate_batch(
            list(prompts), generation_config=settings, continuous_batching_config=memory, warmup=False
        )
        spent = time.process_time() - begin
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in found.values()}
        return Answers([by_prompt[tuple(prompt)] for prompt in prompts], spent)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between two tokens of a stream: the usual one, and the longest one while a long prompt is computed."""

    usual_s: float
    longest_s: float

    @property
    def stretch(self) -> float:
        return self.longest_s / self.usual_s


class TorchmoorEngine:
    """The built-in engine in this process, as a worker assembles it."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        self._engine = make_engine(
            load_model(checkpoint, torch.device("cpu"), dtype), DEFAULT_CPU_KV_BYTES, EngineSettings()
        )
        self._pool = self._engine.runner.pool
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def open(self, count: int) -> list[SequenceCache]:
        """Return an empty cache for each conversation."""
        return [SequenceCache(self._pool, scope=str(i)) for i in range(count)]

    def close(self, caches: Sequence[SequenceCache]) -> None:
        for cache in caches:
            cache.drop()

    def generate(self, prompts: Sequence[Ids], num_new: int) -> Answers:
        caches = self.open(len(prompts))
        answers = self.follow_up(prompts, num_new, caches)
        self.close(caches)
        return answers

    def follow_up(self, prompts: Sequence[Ids], num_new: int, caches: Sequence[SequenceCache]) -> Answers:
        """Answer all prompts at once, each with its own cache; tokens that the cache holds are not computed again."""
        begin = time.process_time()
        sequences = [self._submit(p, num_new, c) for p, c in zip(prompts, caches, strict=True)]
        tokens = [sequence.wait() for sequence in sequences]
        return Answers(tokens, time.process_time() - begin)

    def measure_gaps(self, prompts: Sequence[Ids], long_prompt: Ids, num_before: int) -> tuple[Gaps, Gaps]:
        """Measure the gaps of running streams while a long prompt is computed.

        Return them in elapsed time and in processor time of the engine's thread. num_before: tokens of each stream
        before the long prompt arrives.
        """
        caches = self.open(len(prompts) + 1)
        streams = [self._submit(p, MAX_STREAM_TOKENS, c) for p, c in zip(prompts, caches, strict=False)]
        for stream in streams:
            stream.wait_for(num_before)
        long_stream = self._submit(long_prompt, 1, caches[-1])
        long_stream.wait()
        for stream in streams:
            self._engine.cancel(stream.sequence, TurnTimedOut("measured"))
            stream.ended.wait()
        self.close(caches)
        begin, end = long_stream.submitted, long_stream.times[0]
        return _gaps(streams, begin.wall, end.wall, "wall"), _gaps(streams, begin.wall, end.wall, "cpu")

    def _submit(self, prompt: Ids, num_new: int, cache: SequenceCache) -> "_Stream":
        cache.pin()
        cache.match(prompt)
        stream = _Stream(prompt, num_new, cache)
        self._engine.submit(stream.sequence)
        return stream


@dataclass(frozen=True, slots=True)
class _Moment:
    wall: float
    cpu: float


class _Stream:
    """An answer of the engine, with the moment of each token."""

    def __init__(self, prompt: Ids, num_new: int, cache: SequenceCache) -> None:
        params = SamplingParams(max_new_tokens=num_new)
        request = AnswerRequest(prompt=prompt, images=[], params=params, deadline=NO_DEADLINE, on_event=self._on_event)
        self.sequence = TokenSequence(cache, request)
        self.submitted = _Moment(time.monotonic(), 0.0)
        self.times: list[_Moment] = []
        self.ended = threading.Event()
        self._error: Exception | None = None
        self._grown = threading.Condition()

    def wait(self) -> Ids:
        self.ended.wait()
        if self._error is not None:
            raise self._error
        return self.sequence.output

    def wait_for(self, num_tokens: int) -> None:
        with self._grown:
            self._grown.wait_for(lambda: len(self.times) >= num_tokens or self.ended.is_set())

    def _on_event(self, event: TokenEvent) -> bool:
        """Record an event. The engine's thread calls this, so thread_time() is its processor time."""
        with self._grown:
            if event.error is None:
                self.times.append(_Moment(time.monotonic(), time.thread_time()))
            self._error = event.error
            if event.error is not None or event.finish_reason is not None:
                self.ended.set()
            self._grown.notify()
        return True


def _gaps(streams: Sequence[_Stream], begin: float, end: float, clock: str) -> Gaps:
    before: list[float] = []
    during: list[float] = []
    for stream in streams:
        for a, b in zip(stream.times, stream.times[1:], strict=False):
            gap = getattr(b, clock) - getattr(a, clock)
            if b.wall < begin:
                before.append(gap)
            elif b.wall <= end:
                during.append(gap)
    return Gaps(median(before[len(before) // 2 :]), max(during))


class Served:
    """The same engine behind real TorchServe and the proxy; boto3 reads its streams."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._client = make_runtime_client(fleet.runtime)

    def ask(self, questions: Sequence[str], num_new: int) -> tuple[list[str], int, Spent]:
        """Ask all questions at once, each in its own session.

        Return the answers' texts, their total number of tokens, and the processor time of the servers.
        """
        with ThreadPoolExecutor(len(questions)) as threads:
            sessions = list(threads.map(lambda _: self._open(), questions))
            before = self._fleet.cpu_times()
            texts = list(threads.map(lambda s, q: self._ask(s, q, num_new), sessions, questions))
            spent = self._fleet.cpu_times().since(before)
            list(threads.map(self._close, sessions))
        return texts, num_new * len(questions), spent

    def _open(self) -> str:
        opened = self._invoke("NEW_SESSION", {"requestType": "NEW_SESSION"})
        session: str = opened["NewSessionId"].partition(";")[0]
        return session

    def _ask(self, session: str, question: str, num_new: int) -> str:
        parameters = {"max_new_tokens": num_new}
        body = {"type": "send_text_prompt", "prompt_text": question, "stream": True, "parameters": parameters}
        answer = self._client.invoke_endpoint_with_response_stream(
            EndpointName="llava",
            SessionId=session,
            ContentType="application/json",
            Accept="text/event-stream",
            Body=json.dumps(body),
        )
        streamed = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"]).decode()
        last = json.loads(streamed.rstrip().rpartition("\n\n")[2].removeprefix("data:"))
        if last["details"]["generated_tokens"] != num_new:
            raise RuntimeError(f"the answer should have {num_new} tokens: {last['details']}")
        text: str = last["generated_text"]
        return text

    def _close(self, session: str) -> None:
        self._invoke(session, {"type": "close_session"})

    def _invoke(self, session: str, body: dict[str, Any]) -> Any:
        return self._client.invoke_endpoint(
            EndpointName="llava", SessionId=session, ContentType="application/json", Body=json.dumps(body)
        )


class VllmProcess:
    """A program in the environment of vLLM, which reads tasks and writes answers as lines of JSON."""

    def __init__(self, python: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        self._read()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def ask(self, task: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM did not start or has ended; its output is above")
        return json.loads(line)


class Vllm(VllmProcess):
    """vLLM's LLM class on the CPU (vllm_arm.py)."""

    def __init__(self, python: Path, checkpoint: Path, dtype: str) -> None:
        super().__init__(python, "benchmarks.vllm_arm", str(checkpoint), dtype)

    def generate(self, prompts: Sequence[Ids], num_new: int, *, is_fresh: bool = True) -> Answers:
        """Answer the prompts. is_fresh: empty the prefix cache first."""
        answer = self.ask({"prompts": list(prompts), "num_new": num_new, "is_fresh": is_fresh})
        return Answers(answer["tokens"], answer["cpu_s"])


class VllmChats(VllmProcess):
    """vLLM's AsyncLLM, alone or behind torchmoor's sessions (vllm_engine_arm.py)."""

    def __init__(self, kind: str, python: Path, checkpoint: Path, dtype: str) -> None:
        super().__init__(python, "benchmarks.vllm_engine_arm", kind, str(checkpoint), dtype)

    def chat(self, questions: Sequence[str], num_new: int, *, is_followup: bool) -> tuple[float, float]:
        """Return the processor time per token and the median time to the first token, both in ms."""
        answer = self.ask({"questions": list(questions), "num_new": num_new, "is_followup": is_followup})
        if answer["tokens"] != num_new * len(questions):
            raise RuntimeError(f"{answer['tokens']} tokens instead of {num_new * len(questions)}")
        return answer["cpu_s"] * 1000 / answer["tokens"], median(answer["ttft_s"]) * 1000
