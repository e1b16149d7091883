"""bench/passages.py: what it counts."""

from __future__ import annotations

from bench.passages import LEAST, Count, count

LINES = [f"x{i} = f({i})" for i in range(LEAST + 2)]


def text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_a_passage_is_counted_in_each_place() -> None:
    indented = [f"    {line}  # of {i}" for i, line in enumerate(LINES)]
    found = count({"a": text("a()", *LINES, "b()"), "b": text("c()", *indented)}, "#")
    assert found == Count(files=2, lines=2 * LEAST + 7, passages=2, repeated=2 * len(LINES))


def test_short_ones_comments_and_names_are_not() -> None:
    short = LINES[: LEAST - 1]
    names = [f"{name}: int," for name in "abcdefgh"] + [f"from {name} import b" for name in "abcdefgh"]
    for lines in ([*short, "a()"], [f"# {line}" for line in LINES], names, ["}"] * 20):
        assert count({"a": text(*lines), "b": text(*lines[:-1])}, "#")[2:] == (0, 0)
