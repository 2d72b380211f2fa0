"""The end of a growing text that waits for more, because it may be the beginning of a mark or of a stop sequence."""


def num_held(text: str, mark: str) -> int:
    """Return how many last characters of a text may be the beginning of a mark."""
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1)) if mark else -1
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
