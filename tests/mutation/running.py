"""Running the tests on a file that is changed: each time in a fork of this process, which has imported torch already.

The tests and the library are read from a private copy of the tree, in which one file is changed, so that ranks in
processes of their own run the same. `Baseline` says what each test takes and which lines it executes; a mutant is run
against the tests that execute its line.
"""

import compileall
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .mutants import Mutant
from .targets import Target

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "hypothesis",
    "expecttest",
    "numpy",
    "sympy",
)
"""What the forks need not import; nothing of the library, which each reads anew."""

COPIED = ("dtensor", "compile", "passes", "tests", "bench", "docs", "examples", "pyproject.toml", "README.md")

OPTIONS = (
    *("-q", "-n0", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:pytest_cov"),
    *("-o", "addopts=--import-mode=importlib", "-m", "not nightly", "--hypothesis-seed=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)

SPARE = (15.0, 45.0)
"""Seconds of computing, and of waiting, that a mutant has besides some times what its tests take."""


LATE = 71
"""What a fork ends with of which one test took too long."""


class Copies:
    """Private copies of the tree."""

    def __init__(self, root: Path, folder: Path, count: int) -> None:
        self.folders = [folder / f"copy{i}" for i in range(count)]
        self.unchanged: dict[Path, str] = {}
        for copy in self.folders:
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            for name in COPIED:
                there, options = root / name, {"symlinks": True, "ignore": shutil.ignore_patterns("__pycache__")}
                _ = shutil.copytree(there, copy / name, **options) if there.is_dir() else shutil.copy(there, copy)
            compileall.compile_dir(copy, quiet=2, workers=1)

    def write(self, copy: Path, mutant: Mutant) -> None:
        """Change the file in a copy; what it was compiled to goes, as it may look no older."""
        path = copy / mutant.file
        self.unchanged[copy] = path.read_text()
        path.write_text(mutant.source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
        shutil.rmtree(copy / ".hypothesis", ignore_errors=True)

    def restore(self, copy: Path, mutant: Mutant) -> None:
        (copy / mutant.file).write_text(self.unchanged[copy])


class Chosen:
    """A plugin for pytest that runs the tests with these names, in their order; those that are gone are not missed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.order = {name: i for i, name in enumerate(names)}
        self.failed: list[str] = []
        self.late = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted([i for i in items if i.nodeid in self.order], key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.late = "Timeout (>" in report.longreprtext

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"import of {report.nodeid}")


class Watched:
    """A plugin for pytest that notes of each test how it ended, how long it took, and which lines of `files` it ran."""

    def __init__(self, copy: Path, files: Sequence[str]) -> None:
        import coverage

        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.names = {str((copy / file).resolve()): file for file in files}
        self.coverage = coverage.Coverage(data_file=None, include=list(self.names), config_file=False)
        self.coverage.start()
        self.coverage.switch_context("import")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _forget()
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - start
            self.coverage.switch_context("import")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def found(self) -> dict[str, Any]:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            self.names[path]: {str(n): sorted(found) for n, found in data.contexts_by_lineno(path).items()}
            for path in data.measured_files()
        }
        return {"seconds": self.seconds, "failed": sorted(self.failed), "lines": lines}


def _forget() -> None:
    """Empty what the library keeps, so that a test executes what it needs by itself."""
    for name, module in list(sys.modules.items()):
        if name.startswith("dtensor"):
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
    sys.modules["dtensor.mesh.caches"].clear_caches()


def preload() -> None:
    """Import what forks are to have."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    for name in PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    assert "dtensor" not in sys.modules


def _become_pytest(copy: Path, log: Path) -> None:
    """Of this fork: leave the tree that is tested alone, and everything that was imported of it."""
    os.setsid()
    os.chdir(copy)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PYTHONPATH"] = str(copy)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *[p for p in sys.path if p and Path(p).resolve() != copy.parent.resolve()][1:]]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")


def _fork(work: Callable[[], int], copy: Path, log: Path, computing: float) -> int:
    """The process that does `work` in `copy`; it ends with what that returns."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        _become_pytest(copy, log)
        seconds = int(computing)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        code = work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = 2
    finally:
        os._exit(code)


def _end(process: int) -> None:
    """End the fork and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


@dataclass
class Baseline:
    """What the tests do on the tree as it is.

    Attributes:
        seconds: test -> seconds that it takes.
        lines: file -> line -> the tests that execute it, all for what is executed at import.
        failed: tests that fail as it is, or are skipped, and say nothing about mutants.
        far: as of a `Target`.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]
    failed: list[str]
    far: dict[str, tuple[str, ...]]

    @staticmethod
    def measured(copy: Path, files: Sequence[str], target: Target, out: Path) -> "Baseline":
        """Run all tests once, with the lines they execute watched."""
        told = out / "baseline.json"

        def work() -> int:
            plugin = Watched(copy, files)
            code = int(pytest.main([*OPTIONS, *target.tests], plugins=[plugin]))
            told.write_text(json.dumps(plugin.found()))
            return code

        told.unlink(missing_ok=True)
        process = _fork(work, copy, out / "baseline.log", 3600)
        os.waitpid(process, 0)
        _end(process)
        found = json.loads(told.read_text())
        good = {name: s for name, s in found["seconds"].items() if name not in found["failed"]}
        lines = {
            file: {int(n): (list(good) if "import" in t else [x for x in t if x in good]) for n, t in by_line.items()}
            for file, by_line in found["lines"].items()
        }
        return Baseline(good, lines, found["failed"], target.far)

    def tests(self, mutant: Mutant, killers: Counter[str], others: Counter[str]) -> list[str]:
        """The tests that execute the mutant's lines: first what has killed mutants of the file (`killers`), or `others`
        of other files, then the files that take least."""
        by_line = self.lines.get(mutant.file, {})
        # A statement of several lines counts as executed at its first one, or at any other.
        last = mutant.lines[0]
        while last > 1 and last not in by_line and mutant.lines[0] - last < 12:
            last -= 1
        found = {t for n in (*mutant.lines, last) for t in by_line.get(n, ())}
        files = [file for part, listed in self.far.items() if part in mutant.file for file in listed]
        found |= {t for t in self.seconds if t.partition("::")[0] in files}
        costs: Counter[str] = Counter()
        for t in found:
            costs[t.partition("::")[0]] += self.seconds[t]  # pyright: ignore[reportArgumentType]

        def order(t: str) -> tuple:
            return -killers[t], -others[t], costs[t.partition("::")[0]], t.partition("::")[0], self.seconds[t], t

        return sorted(found, key=order)


@dataclass
class Outcome:
    """What became of a mutant: "killed", "timed out", "survived" or "not executed"; and by which test."""

    mutant: Mutant
    result: str
    by: str = ""
    seconds: float = 0.0


@dataclass
class _Slot:
    copy: Path
    process: int = 0
    mutant: Mutant | None = None
    started: float = 0.0
    limit: float = 0.0


@dataclass
class Runs:
    """Runs of mutants, some at a time."""

    copies: Copies
    baseline: Baseline
    out: Path
    killers: dict[str, Counter[str]] = field(default_factory=dict)
    all_killers: Counter[str] = field(default_factory=Counter)

    def outcomes(self, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
        """What becomes of each, as it is found."""
        todo, slots = list(mutants)[::-1], [_Slot(copy) for copy in self.copies.folders]
        try:
            while todo or any(slot.process for slot in slots):
                for slot in slots:
                    if slot.process:
                        outcome = self._ended(slot)
                        if outcome is not None:
                            yield outcome
                    elif todo:
                        outcome = self._start(slot, todo.pop())
                        if outcome is not None:
                            yield outcome
                time.sleep(0.02)
        finally:
            for slot in slots:
                if slot.process:
                    _end(slot.process)

    def _start(self, slot: _Slot, mutant: Mutant) -> Outcome | None:
        names = self.baseline.tests(mutant, self.killers.setdefault(mutant.file, Counter()), self.all_killers)
        if not names:
            return Outcome(mutant, "not executed")
        self.copies.write(slot.copy, mutant)
        told, files = slot.copy / "killed_by", list(dict.fromkeys([name.partition("::")[0] for name in names]))
        told.unlink(missing_ok=True)

        def work() -> int:
            plugin = Chosen(names)
            code = int(pytest.main([*OPTIONS, "-x", f"--timeout={longest}", *files], plugins=[plugin]))
            told.write_text("\n".join(plugin.failed))
            return LATE if plugin.late else code

        longest = int(SPARE[1] + 6 * max([self.baseline.seconds[name] for name in names]))
        takes = sum([self.baseline.seconds[name] for name in names])
        slot.mutant, slot.started = mutant, time.monotonic()
        slot.limit = slot.started + SPARE[1] + 4 * takes
        slot.process = _fork(work, slot.copy, slot.copy / "log", SPARE[0] + 2 * takes)
        return None

    def _ended(self, slot: _Slot) -> Outcome | None:
        mutant = slot.mutant
        assert mutant is not None
        process, status = os.waitpid(slot.process, os.WNOHANG)
        late = time.monotonic() > slot.limit
        if not process and not late:
            return None
        _end(slot.process)
        if not process:
            os.waitpid(slot.process, 0)
        slot.process = 0
        self.copies.restore(slot.copy, mutant)
        told = slot.copy / "killed_by"
        by = told.read_text().partition("\n")[0] if told.exists() else ""
        if "::" in by:
            self.killers[mutant.file][by] += 1
            self.all_killers[by] += 1
        code = os.waitstatus_to_exitcode(status)
        if late or code in (LATE, -signal.SIGXCPU, -signal.SIGKILL):
            result = "timed out"
        elif code in (0, 5):
            result = "survived"
        else:
            result = "killed"
        return Outcome(mutant, result, by, time.monotonic() - slot.started)
