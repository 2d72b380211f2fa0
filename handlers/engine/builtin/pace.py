"""The number of prompt tokens per step, chosen so that running streams are hardly delayed.

A step's time is the sum of the costs of its decoding rows and of its prompt tokens. Both are measured at run time,
because they differ between a laptop and a GPU by a factor of a thousand. On a GPU, the launches of a step with prompt
tokens also take a time of their own, which a token's mean cost includes: the more tokens, the less each costs.
"""

from handlers.settings.engine import GPU_CHUNK, EngineSettings

WEIGHT = 0.2  # of the newest measurement in the running mean
MIN_CHUNK = 8  # prompt tokens; with fewer, long prompts would take forever
CPU_CHUNK = 512  # prompt tokens in one step, unless the settings say otherwise
NUM_GOOD_STEPS = 1000  # with prompt tokens, before a chunk that was halved is doubled again


class Pace:
    """Limits the prompt tokens of each step. max_chunk: limit even if nothing streams.

    max_stretch: how many times longer than a step without prompts one with prompts may take. least_s: seconds that it
    may take in any case.
    """

    def __init__(self, max_chunk: int, max_stretch: float, least_s: float = 0.0) -> None:
        self.max_chunk = max_chunk
        self._full_chunk = max_chunk
        self._num_good_steps = 0
        self._max_stretch = max_stretch
        self._least_s = least_s
        self._step_s: float | None = None  # of a step with decoding rows only
        self.token_s: float | None = None  # of a prompt token

    def chunk(self, num_decoding: int) -> int:
        """Return how many prompt tokens the next step may have beside this many decoding rows."""
        if not num_decoding or self._step_s is None or self.token_s is None:
            return self.max_chunk
        room_s = max((self._max_stretch - 1) * self._step_s, self._least_s - self._step_s)
        return min(self.max_chunk, max(MIN_CHUNK, int(min(self.max_chunk, room_s / max(self.token_s, 1e-9)))))

    def halve(self) -> None:
        """Halve the chunk for a while, after the device had no memory for a step."""
        self.max_chunk = max(min(MIN_CHUNK, self._full_chunk), self.max_chunk // 2)
        self._num_good_steps = 0

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Add the measured time of a step with this many rows and prompt tokens."""
        if num_prompt_tokens and self.max_chunk < self._full_chunk:
            self._num_good_steps += 1
            if self._num_good_steps >= NUM_GOOD_STEPS:
                self.max_chunk = min(self._full_chunk, 2 * self.max_chunk)
                self._num_good_steps = 0
        if not num_prompt_tokens:
            self._step_s = _mean(self._step_s, seconds)
        elif num_decoding and self._step_s is not None:
            self.token_s = _mean(self.token_s, max(seconds - self._step_s, 0.0) / num_prompt_tokens)
        elif num_prompt_tokens >= MIN_CHUNK:
            self.token_s = _mean(self.token_s, seconds / num_prompt_tokens)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


def make_pace(settings: EngineSettings, *, on_gpu: bool) -> Pace:
    """Return the pace that the settings ask for on this kind of device."""
    chunk = settings.prefill_chunk or (GPU_CHUNK if on_gpu else CPU_CHUNK)
    return Pace(chunk, settings.max_stretch, settings.gpu_step_s if on_gpu else 0.0)
