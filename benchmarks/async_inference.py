"""What does asynchronous inference cost, and what survives? `make bench NAME=async_inference`

submit_vs_insert       the queue's submit against a durable SQLite insert, p50 (async_submit.py); at most 3
"""

from async_submit import NUM_WAITING, measure_submit
from report import median, parse_options, print_report


def main() -> None:
    options = parse_options(__doc__, quick="one round")
    rows = measure_submit(options.rounds)
    ratios = {"submit_vs_insert": median([row["submit_vs_insert"] for row in rows])}
    print_report("async_inference", rows, ratios, save=options.save, waiting=NUM_WAITING)


if __name__ == "__main__":
    main()
