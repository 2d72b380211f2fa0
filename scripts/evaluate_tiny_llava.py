"""Print the accuracy tables of models/tiny-llava/README.md: the share of exactly right answers by question type.

python scripts/evaluate_tiny_llava.py models/tiny-llava
"""

import argparse
from pathlib import Path

import torch
from tiny_llava.evaluate import evaluate

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "models" / "tiny-llava")
    parser.add_argument(
        "--num", type=int, default=200, help="questions per type, drawings, conversations; default: 200"
    )
    parser.add_argument("--mistakes", type=int, default=8, help="wrong answers to print per table; default: 8")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; default: 2")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    evaluate(
        arguments.folder,
        num_per_kind=arguments.num,
        num_mistakes=arguments.mistakes,
        report=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    main()
