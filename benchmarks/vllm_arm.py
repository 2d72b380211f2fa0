"""Runs vLLM's LLM class for engine.py, as a program, because vLLM needs an environment of its own.

    VENV/bin/python benchmarks/vllm_arm.py CHECKPOINT DTYPE

Reads a line of JSON for each task, {"prompts": [[token ids]], "num_new": 64, "is_fresh": true}, and answers with one:
{"tokens": [[ids]], "cpu_s": 1.5}. is_fresh: empty the prefix cache first.
"""

import json
import os
import sys
import time

ANSWERS = os.dup(1)  # vLLM prints to standard output, which becomes standard error
os.dup2(2, 1)
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # runs the engine in this process, whose time is measured
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)


def main() -> None:
    from vllm import LLM, SamplingParams

    checkpoint, dtype = sys.argv[1:]
    llm = LLM(
        model=checkpoint,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=16,
        enforce_eager=True,  # compilation saves no time here, and delays the start by a minute
        enable_prefix_caching=True,
    )
    _answer({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        if task["is_fresh"]:
            llm.reset_prefix_cache()
        params = SamplingParams(max_tokens=task["num_new"], temperature=0.0, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        begin = time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        spent = time.process_time() - begin
        _answer({"tokens": [list(output.outputs[0].token_ids) for output in outputs], "cpu_s": spent})


def _answer(value: dict[str, object]) -> None:
    os.write(ANSWERS, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    main()
