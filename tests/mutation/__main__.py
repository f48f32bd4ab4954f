"""`python -m tests.mutation TARGET`: change the code one place at a time, and see whether the tests notice.

A sample of the mutants of a target (`targets`) is run against the tests of that target. What survives is printed, and
written to DIR; a mutant that is another text for the same program is a row of `equivalent.toml`, with the reason.

    python -m tests.mutation layout --sample 200 --seed 0 --out DIR
    python -m tests.mutation layout --sample 200 --seed 0 --skip 200 --out DIR    # of the same order, the next 200
    python -m tests.mutation layout --again DIR/layout-0-0.json --out DIR         # what survived there
"""

import json
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import click

from . import running
from .mutants import Mutant, places, sampled
from .targets import TARGETS

ROOT = Path(__file__).parents[2]


def equivalents() -> dict[tuple[str, str, str], str]:
    """(file, lines before, lines after) -> why it is the same program."""
    rows = tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text()).get("equivalent", [])
    return {(row["file"], row["before"], row["after"]): row["why"] for row in rows}


def key(mutant: Mutant) -> tuple[str, str, str]:
    """What says which mutant it is wherever its lines stand."""
    return mutant.file, mutant.before, mutant.after


def row(target: str, total: int, results: Counter[str]) -> str:
    """A line of the table: tried are those that are not equivalent."""
    killed = results["killed"] + results["timed out"]
    survived = results["survived"] + results["not executed"]
    share = 100 * killed / max(1, killed + survived)
    cells = (
        *(target, total, killed + survived + results["equivalent"], results["killed"], results["timed out"]),
        *(results["equivalent"], survived, f"{share:.1f} %"),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| target | mutants in all | tried | killed | timed out | equivalent | survived | killed of the rest |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


@click.command(help=__doc__)
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.option("--sample", default=150, help="How many mutants.")
@click.option("--seed", default=0, help="Which ones: what shuffles all of them.")
@click.option("--skip", default=0, help="How many of the shuffled ones are passed over first.")
@click.option("--jobs", default=2, help="How many run at a time.")
@click.option("--file", "only", default="", help="Mutate only files whose path has this in it.")
@click.option("--again", type=click.Path(exists=True, path_type=Path), help="Run what survived in this earlier record.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where records go.")
def main(target: str, sample: int, seed: int, skip: int, jobs: int, only: str, again: Path | None, out: Path) -> None:
    """Run a sample and print the table's row."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = TARGETS[target]
    files = [file for file in chosen.paths(ROOT) if only in file]
    found = [place for file in files for place in places(file, (ROOT / file).read_text())]
    known = equivalents()
    if again is None:
        mutants = sampled(ROOT, found, sample, seed, skip)
    else:
        wanted = {tuple(r["key"]) for r in json.loads(again.read_text()) if r["result"] in ("survived", "not executed")}
        mutants = [m for m in sampled(ROOT, found, len(found), seed) if key(m) in wanted]
    to_run = [m for m in mutants if key(m) not in known]
    results = Counter({"equivalent": len(mutants) - len(to_run)})
    running.preload()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copies = running.Copies(ROOT, Path(folder), jobs)
        start = time.monotonic()
        baseline = running.Baseline.measured(copies.folders[0], files, chosen, out)
        total = sum(baseline.seconds.values())
        print(
            f"{len(baseline.seconds)} tests in {total:.0f} s, {time.monotonic() - start:.0f} s with imports", flush=True
        )
        for name in baseline.failed:
            print(f"  as it is, skipped or failing: {name}")
        records: list[dict[str, Any]] = []
        name = f"{target}-{seed}-{skip}" if again is None else f"{again.stem}-again"
        for done, outcome in enumerate(running.Runs(copies, baseline, out).outcomes(to_run), 1):
            results[outcome.result] += 1
            records.append(
                {"key": key(outcome.mutant), "result": outcome.result, "by": outcome.by, "seconds": outcome.seconds}
            )
            (out / f"{name}.json").write_text(json.dumps(records, indent=1))
            if sys.stderr.isatty():
                print(f"{done} of {len(to_run)}", end="\r", file=sys.stderr)
            if outcome.result in ("survived", "not executed"):
                print(f"{outcome.result}: {outcome.mutant}", flush=True)
    print(HEAD, row(target, len(found), results), sep="\n")


if __name__ == "__main__":
    main()
