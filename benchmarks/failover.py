"""Measures what clients notice when one of three instances fails. `make bench NAME=failover`

Clients hold conversations about images in closed loops, with whole and streamed turns, through the proxy to real
TorchServe with a journal in a directory. In the middle of each round one instance gets a signal:

    kill      SIGKILL to its JVM: the whole instance ends and is started again under its name
    worker    SIGKILL to its Python worker: TorchServe continues and starts another worker
    hang      SIGSTOP to its JVM: connections stay open, but are not served; SIGCONT at the end of the round
    twice     as kill, and then a second instance is killed while it continues answers of the first

Three more clients stream long answers without a session. The text of these answers must always be the same.

Afterwards each session gets a question about its image, once while the instance is away and once when it is back.
Then the journal is read: each turn with a complete answer must be there exactly once, with that answer.

    sessions_lost, turns_lost      in all rounds; must be 0
    failed_before_first_byte       requests that failed before the first byte of an answer; must be 0
    failed_after_first_byte        requests that failed later; must be 0
    long_answers_broken            long answers that ended with an error or have another text; must be 0
    longest_gap_s                  between two pieces of a long answer, in rounds without a hang
    detect_s                       from the SIGKILL of a JVM until its instance gets no more requests; the largest
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.failover_load import Conversation, LongAnswers, Turn, make_conversations
from benchmarks.fleet import Fleet, running_fleet
from benchmarks.report import ROOT, parse_options, print_report

FAULTS = ("kill", "worker", "hang", "twice")
NUM_INSTANCES = 3
NUM_SESSIONS, QUICK_SESSIONS = 18, 9
NUM_LONG = 3
BEFORE_S, QUICK_BEFORE_S = 4.0, 1.0
AFTER_S, QUICK_AFTER_S = 8.0, 3.0
AWAY_TIMEOUT_S = 8.0
SECOND_AFTER_S = 0.5
RETURN_TIMEOUT_S = 120.0
POLL_S = 0.02


def main() -> None:
    options = parse_options(__doc__, quick="one short round of each fault", rounds=3)
    num_sessions = QUICK_SESSIONS if options.quick else NUM_SESSIONS
    before_s, after_s = (QUICK_BEFORE_S, QUICK_AFTER_S) if options.quick else (BEFORE_S, AFTER_S)
    with tempfile.TemporaryDirectory(prefix="torchmoor-journal-") as folder:
        journal = Path(folder)
        checkpoint = ROOT / "models" / "tiny-llava"
        arguments = ("--journal", journal.as_uri())
        with running_fleet(checkpoint, num_instances=NUM_INSTANCES, arguments=arguments) as fleet:
            rows = [
                run_round(fleet, journal, fault, number + shift, num_sessions, before_s, after_s)
                for number in range(options.rounds)
                for shift, fault in enumerate(FAULTS)
            ]
    detected = [row["detect_s"] for row in rows if row["fault"] == "kill"]
    ratios = {
        "sessions_lost": sum(row["sessions_lost"] for row in rows),
        "turns_lost": sum(row["turns_lost"] for row in rows),
        "failed_before_first_byte": sum(row["failed_before_byte"] for row in rows),
        "failed_after_first_byte": sum(row["failed_after_byte"] for row in rows),
        "long_answers_broken": sum(row["long_broken"] for row in rows),
        "longest_gap_s": max((row["longest_gap_s"] for row in rows if row["fault"] != "hang"), default=None),
        "detect_s": None if None in detected else max(detected),
    }
    print_report("failover", rows, ratios, options, instances=NUM_INSTANCES, sessions=num_sessions, journal="directory")


def run_round(
    fleet: Fleet, journal: Path, fault: str, first: int, num_sessions: int, before_s: float, after_s: float
) -> dict[str, Any]:
    """Cause one fault under load and return the outcomes.

    first: number of the instance that fails. before_s, after_s: shortest duration of the load before and after the
    fault.
    """
    victim, second = (f"llava-{(first + shift) % NUM_INSTANCES}" for shift in range(2))
    chats = make_conversations(fleet.runtime, num_sessions)
    for chat in chats:
        chat.open()
    jvm, worker = fleet.processes(victim)
    second_jvm, _ = fleet.processes(second)
    stop = threading.Event()
    expected = LongAnswers(fleet.runtime, b"", stop).read()
    streams = [LongAnswers(fleet.runtime, expected, stop) for _ in range(NUM_LONG)]
    threads = [*streams, *(threading.Thread(target=chat.run, args=(stop,), daemon=True) for chat in chats)]
    for thread in threads:
        thread.start()
    time.sleep(before_s)
    while not all(chat.turns for chat in chats):
        time.sleep(POLL_S)
    failed_at = time.monotonic()
    os.kill(worker if fault == "worker" else jvm, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)
    try:
        away_at = wait_for_state(fleet, victim, is_ready=False, until=failed_at + AWAY_TIMEOUT_S)
        if fault == "twice":
            time.sleep(SECOND_AFTER_S)
            os.kill(second_jvm, signal.SIGKILL)
        time.sleep(max(0.0, failed_at + after_s - time.monotonic()))
        stop.set()
        for thread in threads:
            thread.join()
        lost = [chat for chat in chats if not chat.is_alive()]
    finally:
        stop.set()
        if fault == "hang":
            os.kill(jvm, signal.SIGCONT)
    back_at = wait_for_state(fleet, victim, is_ready=True, until=time.monotonic() + RETURN_TIMEOUT_S)
    wait_for_state(fleet, second, is_ready=True, until=time.monotonic() + RETURN_TIMEOUT_S)
    lost += [chat for chat in chats if chat not in lost and not chat.is_alive()]
    row = {
        "fault": fault,
        "sessions_lost": len(lost),
        "turns_lost": sum(chat.num_turns_lost(journal) for chat in chats),
        **summarize(chats, failed_at),
        "long_answers": sum(stream.num_ended for stream in streams),
        "long_broken": sum(stream.num_broken for stream in streams),
        "longest_gap_s": max(stream.longest_gap_s for stream in streams),
        "detect_s": None if away_at is None else away_at - failed_at,
        "back_s": None if back_at is None else back_at - failed_at,
    }
    for chat in chats:
        chat.close()
    print(
        "  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )
    for chat in chats:
        for turn in chat.turns:
            if turn.failure:
                print(f"  {turn.began - failed_at:+.2f} s, after {turn.took_s:.2f} s: {turn.instance} {turn.failure}")
    return row


def summarize(chats: Sequence[Conversation], failed_at: float) -> dict[str, Any]:
    """Return counts of turns, and the slowest turns that ended before and after the instance failed."""
    turns = [turn for chat in chats for turn in chat.turns]
    failed = [turn for turn in turns if turn.failure]
    return {
        "turns": len(turns),
        "failed_before_byte": sum(not turn.has_bytes for turn in failed),
        "failed_after_byte": sum(turn.has_bytes for turn in failed),
        "slowest_before_s": max(turn.took_s for turn in turns if _ended_at(turn) < failed_at),
        "slowest_after_s": max(turn.took_s for turn in turns if _ended_at(turn) >= failed_at),
    }


def _ended_at(turn: Turn) -> float:
    return turn.began + turn.took_s


def wait_for_state(fleet: Fleet, name: str, *, is_ready: bool, until: float) -> float | None:
    """Return the moment at which the proxy's view of the instance became ready, or not ready; None if it did not."""
    while (now := time.monotonic()) < until:
        (instance,) = [instance for instance in fleet.instances() if instance["name"] == name]
        if (instance["state"] == "ready") is is_ready:
            return now
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    main()
