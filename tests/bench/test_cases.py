"""Each case runs, in its tiny form, and writes records that are whole; of exact figures some are checked."""

import pytest
from click.testing import CliRunner

from bench import cli, record
from bench.cases import CASES, gpu
from bench.record import OURS

SHORT = ("call", "eager", "memory", "gpu", "redistribute")
"""Those that take seconds; the others are nightly."""

FIGURES = {
    "call": "call over plain tensors",
    "eager": "relu",
    "memory": "peak",
    "redistribute": "bytes, merged groups",
    "step": "exposed communication",
    "scale": "predicted step",
    "compile": "aot_eager: time by ranks",
    "operators": "not local",
    "wire": "step: bytes",
    "start": "first step, packaged",
    "save": "save",
    "watch": "comparison",
    "record": "step, eager",
}
"""A figure that each case has."""


def records(case, folder):
    out = folder / "records.jsonl"
    done = CliRunner().invoke(cli.main, [case, "--tiny", "--quiet", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"## {case}" in done.output
    return record.read(out.read_text().splitlines())


@pytest.mark.parametrize("case", [c if c in SHORT else pytest.param(c, marks=pytest.mark.nightly) for c in CASES])
def test_a_case_writes_records(case, tmp_path):
    found = records(case, tmp_path)
    assert {r.case for r in found} == {case}
    assert all(r.machine and r.versions for r in found)
    for r in found:
        assert r.value is not None or r.note, r
        assert r.ratio is None or r.ratio >= 0 or "over plain" in r.figure or "saved" in r.figure, r
        assert r.spread is None or r.spread[0] <= r.spread[1]
    if case in FIGURES:
        (first, *_) = [r for r in found if r.figure == FIGURES[case]]
        assert (first.side, bool(first.peer)) == (OURS, True)
    if case == "memory":
        by_peer = {r.peer: r for r in found if r.figure == "peak"}
        assert 0 < (by_peer["by hand"].ratio or 0) < 1.3
        assert {r.ratio for r in found if r.figure == "between steps"} == {1.0}
    if case == "redistribute":
        assert all((r.ratio or 0) <= 1 for r in found if r.figure.startswith("bytes"))
    if case == "gpu":
        assert [r.note for r in found] == [gpu.WITHOUT] or found[0].value is not None
