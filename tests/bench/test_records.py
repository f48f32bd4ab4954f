"""Records, and the tables and pictures made of them."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner

from bench import cli, record, table
from bench.record import Setting
from bench.timing import compared, interleaved, quartiles

AT = Setting("step", "mlp", "tp", 2, "1gbit")


def test_ratios_are_taken_round_by_round():
    found = compared([2.0, 3.0, 8.0], [1.0, 6.0, 4.0], scale=1e3)
    assert (found.value, found.peer_value, found.ratio, found.spread) == (3000.0, 4000.0, 2.0, (1.25, 2.0))
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)


def test_sides_take_turns():
    seen = []
    times = interleaved(
        {s: lambda s=s: seen.append(s) for s in "ab"}, rounds=3, calls=2, before=lambda: seen.append("|")
    )
    assert "".join(seen[:12]).replace("|", "") in ("aabbbbaa", "bbaaaabb")
    assert [seen[i : i + 3] for i in range(0, 18, 3)].count(["|", "a", "a"]) == 3
    assert [len(t) for t in times.values()] == [3, 3]


def test_no_side_always_runs_after_the_same_one():
    seen = []
    interleaved({s: lambda s=s: seen.append(s) for s in "abcd"}, rounds=12)
    rounds = ["".join(seen[i : i + 4]) for i in range(0, 48, 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert all(there == back[::-1] for there, back in zip(rounds[::2], rounds[1::2]))
    assert {before + after for r in rounds for before, after in pairwise(r)} == {
        a + b for a in "abcd" for b in "abcd" if a != b
    }


def test_exact_figures():
    assert AT.counted("bytes", "bytes", 3, "by hand", 4).ratio == 0.75
    assert AT.counted("bytes", "bytes", 0, "by hand", 0).ratio == 1.0
    assert AT.counted("bytes", "bytes", 3, "by hand", 0).ratio is None


def test_a_record_survives_its_line():
    made = AT.timed("step", "ms", compared([1.0, 2.0], [2.0, 2.0]), "torch eager", note="x")
    (found,) = record.read([record.line(record.stamped(made))])
    assert found.machine["cores"] >= 1
    assert found.versions["torch"].startswith("2.")
    assert (found.model, found.plan, found.ranks, found.link) == ("mlp", "tp", 2, "1gbit")
    assert (found.ratio, found.spread, found.note) == (0.75, (0.625, 0.875), "x")


@pytest.mark.parametrize("text", ["{", '{"figure": "x"}', json.dumps({"case": "a", "colour": 1})])
def test_what_is_no_record_is_named(text):
    with pytest.raises(ValueError, match="line 2 is not a record of python -m bench"):
        record.read([record.line(AT.alone("overlap", 1.0, "of 1")), text])


RECORDS = [
    AT.counted("step", "ms", 9.0, "torch eager", 3.0),
    AT.counted("step", "ms", 1.0, "torch eager", 4.0),
    AT.counted("step", "ms", 1.0, "by hand", 0.5),
    AT.missing("step", "torch compiled: it\nfails | so", "torch compiled"),
    AT.timed("compute", "ms", compared([1.0, 2.0], [2.0, 2.0], 1e3), "by hand"),
]


def test_a_table_has_a_row_for_a_figure_and_a_column_for_a_peer():
    """The last record of a figure counts; what is behind is in bold, what does not run a note. The verdict counts."""
    assert table.markdown(RECORDS).splitlines()[:10] == [
        "## step",
        "",
        "1 of 1 figures not behind torch eager, median 0.25; "
        "1 of 2 figures not behind by hand, median 1.38, worst 2.00 (mlp tp step).",
        "",
        "| figure | value | torch eager | by hand | torch compiled |",
        "|---|---|---|---|---|",
        "| step | 1.00 ms | 0.25 | **2.00** | (1) |",
        "| compute | 1,500.00 ms |  | 0.75 (0.62 to 0.88) |  |",
        "",
        "1. torch compiled: it fails \\| so",
    ]


def test_each_version_of_torch_has_its_columns():
    taken = [
        replace(AT.counted(figure, "ms", value, "torch eager", 4.0), versions={"torch": torch})
        for torch, value in (("2.13.0+cpu", 2.0), ("2.15.0+cu130", 3.0))
        for figure in ("step", "compute")
    ] + [replace(AT.alone("overlap", 1.0, "of 1"), versions={"torch": torch}) for torch in ("2.13.0", "2.15.0")]
    assert table.markdown(taken).splitlines()[4:9] == [
        "| figure | value | torch eager (2.13) | torch eager (2.15) |",
        "|---|---|---|---|",
        "| step | 2.00 ms | 0.50 | 0.75 |",
        "| compute | 2.00 ms | 0.50 | 0.75 |",
        "| overlap | 1 of 1 |  |  |",
    ]


def test_the_command_writes_tables_and_pictures(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("".join(record.line(record.stamped(r)) + "\n" for r in RECORDS))
    done = CliRunner().invoke(cli.main, ["table", str(file), "--plots", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert "plots/step.svg" in done.output
    assert "| step | 1.00 ms | 0.25 | **2.00** | (1) |" in done.output
    assert "Measured on: cpu " in done.output
    assert b"<svg" in (tmp_path / "plots" / "step.svg").read_bytes()


def test_wrong_files_and_cases_are_refused(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text("nonsense\n")
    done = CliRunner().invoke(cli.main, ["table", str(file)])
    assert done.exit_code == 1
    assert "line 1 is not a record" in done.output
    assert CliRunner().invoke(cli.main, ["stepp"]).exit_code == 2


def test_a_case_that_fails_is_a_record_and_the_others_run(monkeypatch, tmp_path):
    def fails(effort):
        yield AT.counted("step", "ms", 1.0, "by hand", 2.0)
        raise RuntimeError("no wire")

    monkeypatch.setattr(cli.CASES["step"], "run", fails)
    out = tmp_path / "records.jsonl"
    done = CliRunner().invoke(cli.main, ["step", "gpu", "--tiny", "--quiet", "--out", str(out)])
    assert done.exit_code == 1
    assert "cases that failed: step" in done.output
    found = record.read(out.read_text().splitlines())
    assert [(r.case, r.ratio, r.note) for r in found[:2]] == [
        ("step", 0.5, ""),
        ("step", None, "dtensor: RuntimeError: no wire"),
    ]
    assert found[2:]
    assert all(r.case.startswith("gpu") for r in found[2:])
