"""Lines of several ranks, merged."""

from dtensor.testing.simulation import lines
from dtensor.testing.simulation.lines import Lines


def shown(*texts, done=True):
    merged = Lines(len(texts))
    for rank, text in enumerate(texts):
        merged.add(rank, text)
    merged.end()
    return list(merged.ready([done] * len(texts), True))


def test_equal_lines_stand_once():
    assert shown("a\nb\n", "a\nb\n") == ["ranks 0, 1: a", "ranks 0, 1: b"]
    assert shown("a\nx\n", "a\ny\n", "a\nx\n") == ["ranks 0-2: a", "ranks 0, 2: x", "rank 1: y"]


def test_lines_of_some_ranks_do_not_part_the_others():
    assert shown("only\nboth\n", "both\n") == ["rank 0: only", "ranks 0, 1: both"]
    assert shown("both\n", "only\nboth\n") == ["rank 1: only", "ranks 0, 1: both"]
    assert shown("a\nb\n", "b\na\n") == ["rank 0: a", "ranks 0, 1: b", "rank 1: a"]


def test_a_line_may_come_in_parts_and_be_written_over():
    merged = Lines(1)
    merged.add(0, "10 %\r20")
    assert list(merged.ready([False])) == []
    merged.add(0, " %\r\nend")
    assert list(merged.ready([False])) == ["rank 0: 20 %"]
    merged.end()
    assert list(merged.ready([True])) == ["rank 0: end"]


def test_a_line_waits_for_its_like_but_not_for_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    merged = Lines(2)
    merged.add(0, "a\n")
    assert list(merged.ready([False, False])) == []
    now[0] = 2 * lines.HOLD
    assert list(merged.ready([False, False])) == ["rank 0: a"]
    merged.add(1, "a\n")
    assert list(merged.ready([True, False])) == ["rank 1: a"]
