"""Tables: as wide as the terminal, complete in a pipe."""

import pytest

from torchmoor.cli.tables import format_table, in_bytes, in_time

ROWS = [("llava-0", "12", "a long reason " * 8), ("b", "3", "short")]


def test_a_pipe_gets_everything() -> None:
    """A table in a pipe is not shortened."""
    lines = list(format_table(("NAME", "LOAD", "WHY"), ROWS))

    assert lines[1].endswith("a long reason")
    assert len(lines[1]) > 80


def test_a_terminal_is_kept_to() -> None:
    """On a terminal only the widest text is shortened."""
    lines = list(format_table(("NAME", "LOAD", "WHY"), ROWS, 60))

    assert max(map(len, lines)) == 60
    assert lines[1].startswith("llava-0    12  a long")
    assert lines[1].endswith("…")
    assert lines[2].endswith("short")


def test_a_terminal_narrower_than_the_columns_is_kept_to() -> None:
    """On a very narrow terminal cells stay readable, and the last columns are left out."""
    heads = tuple(f"COLUMN-{i}" for i in range(6))

    lines = list(format_table(heads, [("a" * 20,) * 6], 40))

    assert lines == ["COLUMN-0  COLUMN-1  COLUMN-2  COLUMN-3 …", "aaaaaaa…  aaaaaaa…  aaaaaaa…  aaaaaaa… …"]


def test_numbers_stand_under_each_other() -> None:
    """Numbers are aligned to the right, so that they can be compared."""
    lines = list(format_table(("NAME", "LOAD"), [("a", "1"), ("b", "100")]))

    assert lines == ["NAME  LOAD", "a        1", "b      100"]


@pytest.mark.parametrize(
    ("number", "said"), [(None, ""), (0, "0"), (999, "999"), (1536, "1.5K"), (40 << 20, "40M"), (3 << 40, "3.0T")]
)
def test_bytes_are_short(number: int | None, said: str) -> None:
    """Bytes have two significant digits."""
    assert in_bytes(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(-3, "0 s"), (59.4, "59 s"), (61, "1 min"), (7260, "2 h 1 min"), (900_000, "10 d")]
)
def test_times_are_short(seconds: float, said: str) -> None:
    """Times are in their largest units, and a clock that runs behind does not give a negative age."""
    assert in_time(seconds) == said


def test_wide_characters_take_two_columns() -> None:
    """A terminal draws characters of Chinese, Japanese and Korean in two columns, and accents in none."""
    rows = [("模型模型模型模型", "1"), ("cafe\u0301", "2")]

    lines = list(format_table(("MODEL", "HITS"), rows))
    cut = list(format_table(("MODEL", "HITS"), rows, 15))

    assert lines == ["MODEL             HITS", "模型模型模型模型     1", "cafe\u0301                 2"]
    assert cut == ["MODEL      HITS", "模型模型…     1", "cafe\u0301          2"]


def test_control_characters_of_names_are_not_sent_to_the_terminal() -> None:
    """A terminal would obey them."""
    assert list(format_table(("MODEL", "WHY"), [("a\x1b[2Jb", "c\u009bd\ne")]))[1] == "a [2Jb  c d e"
