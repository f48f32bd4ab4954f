"""Targets: the files that are mutated, and the tests that are to notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """What is mutated and what is run.

    Attributes:
        files: patterns of files, relative to the root of the repository.
        tests: files and folders of tests that run in one process, threads included.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]

    def paths(self, root: Path) -> list[str]:
        """The files, sorted."""
        found = {p for pattern in self.files for p in root.glob(pattern) if p.name != "__init__.py"}
        return [str(p.relative_to(root)) for p in sorted(found)]


TARGETS = {
    "layout": Target(
        ("dtensor/layout/*.py",), ("tests/layout", "tests/comm/test_redistribute.py", "tests/mesh/test_links.py")
    ),
    "rules": Target(
        ("dtensor/rules/*.py", "dtensor/rules/families/*.py"),
        ("tests/rules", "tests/dispatch", "tests/tensor/test_random.py"),
    ),
    "algebra": Target(("passes/algebra/*.py",), ("tests/passes/algebra", "tests/passes/test_pipeline.py")),
    "agreement": Target(
        ("dtensor/comm/agreement.py", "dtensor/mesh/collective_order.py", "dtensor/comm/replication_check.py"),
        (
            *("tests/comm/test_agreement.py", "tests/comm/test_replication_check.py"),
            *("tests/mesh/test_collective_order.py", "tests/mesh/test_job.py"),
            "tests/compile/backends/test_agreement.py",
        ),
    ),
}
