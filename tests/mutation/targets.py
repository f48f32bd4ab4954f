"""Targets: the files that are mutated, and the tests that are to notice."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """What is mutated and what is run.

    Attributes:
        files: patterns of files, relative to the root of the repository.
        tests: files and folders of tests.
        far: part of a file's path -> those of the tests that run its code in processes of their own, where it is not
            seen which lines they execute.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    far: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def paths(self, root: Path) -> list[str]:
        """The files, sorted."""
        found = {p for pattern in self.files for p in root.glob(pattern) if p.name != "__init__.py"}
        return [str(p.relative_to(root)) for p in sorted(found)]


TARGETS = {
    "layout": Target(
        ("dtensor/layout/*.py", "dtensor/prices/links.py", "dtensor/prices/machine.py"),
        (
            "tests/layout",
            "tests/comm/test_redistribute.py",
            "tests/prices/test_calibrated.py",
            "tests/prices/test_machine.py",
        ),
    ),
    "rules": Target(
        ("dtensor/rules/*.py", "dtensor/rules/families/*.py"),
        (
            *("tests/rules", "tests/sweep", "tests/fuzz/test_eager.py", "tests/dispatch/test_dispatch.py"),
            *("tests/dispatch/test_operators.py", "tests/dispatch/test_strictness.py"),
            *("tests/dispatch/test_registration.py", "tests/tensor/test_random.py", "tests/tensor/test_bad_indices.py"),
            *("tests/tensor/test_second_derivatives.py", "tests/parallel/training/test_loss.py"),
        ),
        far={
            "families/": ("tests/sweep/test_operators.py",),
            "random.py": ("tests/tensor/test_random.py",),
            "sampling.py": ("tests/tensor/test_random.py",),
        },
    ),
    "algebra": Target(("passes/algebra/*.py",), ("tests/passes/algebra", "tests/passes/test_pipeline.py")),
    "agreement": Target(
        ("dtensor/comm/agreement.py", "dtensor/job/collective_order.py", "dtensor/comm/replication_check.py"),
        (
            *("tests/comm/test_agreement.py", "tests/comm/test_replication_check.py"),
            *("tests/job/test_collective_order.py", "tests/job/test_job.py"),
            *("tests/compile/backends/test_agreement.py", "tests/parallel/checks/test_input_check.py"),
        ),
        far={
            "agreement.py": ("tests/compile/backends/test_agreement.py",),
            "replication_check.py": ("tests/parallel/checks/test_input_check.py",),
        },
    ),
}
