"""Train models/tiny-llava from scratch: scenes, tokenizer, vision tower and language model, all from one seed.

    python scripts/train_tiny_llava.py --out models/tiny-llava

Training has three stages: the vision tower with a per-patch teacher, then conversations, then harder conversations.
With --work, the state after each stage is saved, and a stage whose state exists is skipped.
"""

import argparse
import time
from pathlib import Path

import torch
from tiny_llava.samples import write_samples
from tiny_llava.train import HARD_LANGUAGE, LANGUAGE, VISION, Trainer

ROOT = Path(__file__).resolve().parent.parent


def report(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tiny-llava", help="folder of the checkpoint")
    parser.add_argument("--work", type=Path, help="folder for the state after each stage; default: save none")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; default: 2")
    parser.add_argument("--seed", type=int, default=7, help="of weights, scenes and conversations; default: 7")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(seed=arguments.seed, out=arguments.out, report=report)
    report(f"parameters={trainer.num_parameters} tokens={len(trainer.processor.tokenizer)}")
    for stage in (VISION, LANGUAGE, HARD_LANGUAGE):
        state = arguments.work / f"{stage.name}.pt" if arguments.work else None
        if state is not None and state.exists():
            trainer.load_state(state)
            report(f"{stage.name}: skipped, its state was loaded from {state}")
            continue
        run = trainer.train_vision if stage is VISION else trainer.train_language
        run(stage)
        if state is not None:
            trainer.save_state(state)
    trainer.save()
    write_samples(arguments.out / "samples")
    report(f"saved in {arguments.out}")


if __name__ == "__main__":
    main()
