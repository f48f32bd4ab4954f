"""Mutation tests: python -m tests.mutation layout --sample 150 --seed 1 --out DIR

Cosmic Ray's operators change one place of a file: a comparison, a number, a condition, a loop that no longer runs. A
test that fails kills the mutant. One that passes all tests survives, and is either a hole in the tests or equivalent to
the original (`EQUIVALENT`).

Every worker has a copy of the source tree, in which one file is mutated. A mutant runs in a fork of a process that has
imported torch and whatever else takes long, but nothing of dtensor. The fork runs the tests that execute the changed
line, the fast ones first; a first run of the unchanged tests finds out which these are, by coverage. A mutant that
takes longer than `TIMEOUT` counts as killed.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .targets import EQUIVALENT, OPERATORS, TARGETS

ROOT = Path(__file__).resolve().parents[2]
TREE = ("dtensor", "compile", "passes", "tests", "docs", "pyproject.toml")
TIMEOUT = 60.0
"""Seconds for the tests of one mutant."""
MOST = 60
"""Tests of one mutant at most, those that take least; where a line is run by more, the others would rarely tell
more."""
PLAIN = ("-o", "addopts=--import-mode=importlib")
"""In this process: coverage does not tell tests apart where pytest-xdist is asked to distribute them."""
HEAVY = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "numpy",
    "sympy",
    "hypothesis",
)
HEAVY += ("pytest", "networkx", "torch.testing._internal.common_methods_invocations", "torch.distributed.checkpoint")


UNTESTED_DECORATORS = ("lru_cache", "functools.lru_cache", "cache", "dataclass")
"""What these say changes how fast a program is, or what it must not do, but no result."""


@dataclass(frozen=True)
class Mutant:
    """One change: the `occurrence`-th place in `file` where `operator` applies, on `line`, whose text is `text`."""

    file: str
    operator: str
    occurrence: int
    line: int
    text: str


def mutants(file: str) -> Iterator[Mutant]:
    """All of a file, but those of annotations, error texts, `__all__` and what `_is_large` and the table leave out."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    source = (ROOT / file).read_text()
    lines, skipped = source.splitlines(), set(_not_code(source))
    tree = get_ast(source)
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        count = 0
        for node in ast_nodes(tree):
            for (line, column), _ in operator.mutation_positions(node):
                if (line, column) not in skipped and not (name == "NumberReplacer" and _is_large(node)):
                    yield Mutant(file, name, count, line, lines[line - 1].strip())
                count += 1


def _is_large(node: Any) -> bool:
    """Whether a number changes by less than a thousandth if 1 is added to it: constants of the cost model, units."""
    with contextlib.suppress(ValueError):
        return abs(float(node.value)) > 1000
    return False


def _not_code(source: str) -> Iterator[tuple[int, int]]:
    """Every place within what no test has to notice."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        skipped: list[ast.AST] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
            skipped += [a.annotation for a in given if a is not None and a.annotation is not None]
            skipped += [node.returns] if node.returns is not None else []
            yield from _stars(lines, node.lineno, node.body[0].lineno)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            skipped += [d for d in node.decorator_list if ast.unparse(d).partition("(")[0] in UNTESTED_DECORATORS]
        elif isinstance(node, ast.AnnAssign):
            skipped.append(node.annotation)
        elif isinstance(node, (ast.Raise, ast.Assert)):
            skipped += [node.exc] if isinstance(node, ast.Raise) and node.exc else []
            skipped += [node.msg] if isinstance(node, ast.Assert) and node.msg else []
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            skipped.append(node.value)
        for inner in skipped:
            for line in range(inner.lineno, inner.end_lineno + 1):  # type: ignore[attr-defined]
                first = inner.col_offset if line == inner.lineno else 0  # type: ignore[attr-defined]
                last = inner.end_col_offset if line == inner.end_lineno else len(lines[line - 1])  # type: ignore[attr-defined]
                yield from ((line, column) for column in range(first, last))


def _stars(lines: list[str], first: int, end: int) -> Iterator[tuple[int, int]]:
    """The stars of a signature, which Cosmic Ray takes for products."""
    for line in range(first, end):
        yield from ((line, column) for column, c in enumerate(lines[line - 1]) if c == "*")


def copied(folder: Path) -> Path:
    """A copy of the tree; links stay links."""
    for name in TREE:
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__", "*.png", "*.svg")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def covering(target: str, folder: Path) -> dict[tuple[str, int], list[str]]:
    """(file, line) -> the tests that run it, by the time they take. Line 0: those of any line of the file."""
    from coverage import CoverageData

    files, tests = TARGETS[target]
    report = folder / "times.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        *tests,
        "-q",
        "-p",
        "no:cacheprovider",
        "-x",
        *PLAIN,
        "-m",
        "not nightly",
    ]
    command += [f"--cov={file}" for file in ("dtensor", "passes")] + ["--cov-context=test", "--cov-report="]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "COVERAGE_FILE": str(folder / ".coverage"),
        "OMP_NUM_THREADS": "1",
    }
    environment["MUTATION_TIMES"] = str(report)
    command += ["-p", "tests.mutation.times"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the unchanged tests of {target} fail:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    times = json.loads(report.read_text())
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    found: dict[tuple[str, int], list[str]] = {}
    for file in files:
        path = str((folder / file).resolve())
        everywhere: set[str] = set()
        for line, contexts in data.contexts_by_lineno(path).items():
            ran = {c.partition("|")[0] for c in contexts if c}
            everywhere |= ran
            found[file, line] = sorted(ran, key=lambda t: times.get(t, 0.0))
        found[file, 0] = sorted(everywhere, key=lambda t: times.get(t, 0.0))
    print(f"{target}: {len(times)} tests in {sum(times.values()):.0f} s", flush=True)
    return found


def _is_of_function(file: str) -> set[int]:
    """The lines in bodies of functions; others run when the module is imported, and concern all tests of the file."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            first = node.body[0].lineno if isinstance(node.body, list) else node.body.lineno
            lines.update(range(first, (node.end_lineno or first) + 1))
    return lines


def changed(mutant: Mutant) -> str | None:
    """The file's text with the change; None where that is no program, or changes nothing."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = (ROOT / mutant.file).read_text()
    text = mutate_code(source, get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    with contextlib.suppress(SyntaxError):
        if text is not None and ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)):
            return text
    return None


def _changed_line(before: str, after: str) -> str:
    """The first line that differs, as it is after the change, without its spaces."""
    pairs = zip(before.splitlines(), after.splitlines())
    return next((b for a, b in pairs if a != b), "").replace(" ", "")


def verdict_on(file: str, text: str, tests: list[str], folder: Path) -> tuple[str, str, float]:
    """ "killed", "timeout" or "survived", by which test, after how many seconds, with `text` in `file`. Runs in a
    fork."""
    begin, log = time.monotonic(), folder / "mutant.log"
    (folder / file).write_text(text)
    try:
        pid = os.fork()
        if not pid:
            _child(tests, folder, log)
        while time.monotonic() - begin < TIMEOUT:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                lines = log.read_text(errors="replace").splitlines() if log.exists() else []
                by = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
                return ("survived" if status == 0 else "killed"), by[:160], time.monotonic() - begin
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "timeout", "", time.monotonic() - begin
    finally:
        (folder / file).write_text((ROOT / file).read_text())


def _child(tests: list[str], folder: Path, log: Path) -> None:
    os.setsid()
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:] = [str(folder), *[p for p in sys.path if p not in ("", str(ROOT))]]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [n for n in sys.modules if n == "tests" or n.startswith(("tests.", "dtensor"))]:
        del sys.modules[name]
    pytest = importlib.import_module("pytest")
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "--no-header", *PLAIN]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not nightly"]
    code = 1
    try:
        code = int(pytest.main([*tests, *options]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(min(code, 1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument("--sample", type=int, default=150, help="mutants of each target; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutation"), help="folder for what survived")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for target in given.targets:
        rows.append(_run(target, given))
        print(_table(rows), flush=True)


def _run(target: str, given: argparse.Namespace) -> dict[str, object]:
    files, _ = TARGETS[target]
    every = [m for file in files for m in mutants(file)]
    chosen = random.Random(given.seed).sample(every, min(given.sample or len(every), len(every)))
    counts: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as scratch, (given.out / f"{target}.jsonl").open("w") as record:
        ran = covering(target, copied(Path(scratch, "covering")))
        for name in HEAVY:
            importlib.import_module(name)
        folders = [copied(Path(scratch, str(k))) for k in range(given.workers)]
        inside = {file: _is_of_function(file) for file in files}

        def judged(mutant: Mutant) -> tuple[Mutant, str, str, float]:
            at = mutant.line if mutant.line in inside[mutant.file] else 0
            tests = ran.get((mutant.file, at), [])[:MOST]
            text = changed(mutant)
            if text is None:
                return mutant, "same", "", 0.0
            line = _changed_line((ROOT / mutant.file).read_text(), text)
            if (mutant.file, line) in EQUIVALENT:
                return mutant, "equivalent", EQUIVALENT[mutant.file, line], 0.0
            if not tests:
                return mutant, "survived", "no test runs this line", 0.0
            folder = folders.pop()
            try:
                return mutant, *verdict_on(mutant.file, text, tests, folder)
            finally:
                folders.append(folder)

        for file in files:  # a test that fails in a fork of the unchanged program would kill every mutant
            said = verdict_on(file, (ROOT / file).read_text(), ran[file, 0][:MOST], folders[0])
            if said[0] != "survived":
                sys.exit(
                    f"the unchanged {file} is {said[0]} by {said[1]}: {(folders[0] / 'mutant.log').read_text()[-2000:]}"
                )

        from tqdm import tqdm

        with ThreadPoolExecutor(given.workers) as pool:
            for mutant, verdict, by, seconds in tqdm(
                pool.map(judged, chosen), total=len(chosen), desc=target, mininterval=10
            ):
                counts[verdict] += 1
                record.write(json.dumps(asdict(mutant) | {"verdict": verdict, "by": by, "seconds": seconds}) + "\n")
                record.flush()
    return {"target": target, "all": len(every), "tried": len(chosen) - counts["same"], **counts}


def _table(rows: list[dict[str, object]]) -> str:
    names = ("killed", "timeout", "equivalent", "survived")
    lines = [
        "| target | mutants | tried | killed | timed out | equivalent | survived | killed of the others |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = [int(str(row.get(n, 0))) for n in names]
        ended = numbers[0] + numbers[1]
        share = ended / max(ended + numbers[3], 1)
        lines.append(
            f"| {row['target']} | {row['all']} | {row['tried']} | {' | '.join(map(str, numbers))} | {share:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
