"""`docs/operators.md` is what `dtensor operators` prints."""

from pathlib import Path

import torch
from click.testing import CliRunner
from torch import ops

from dtensor.testing.rules.operators_page import family_of
from dtensor.tools.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"


def test_the_page_is_up_to_date_and_says_what_the_engine_decides():
    done = CliRunner().invoke(main, ["operators"])
    assert done.exit_code == 0
    for row in (
        "| `_log_softmax` | native | [2, 3] | S(0) -> S(0); S(1) -> S(1) |  |",
        "| `aminmax` | decomposed |  |  |  |",
        "| `bincount` | values: its result is a number, or has a shape, that depends on all values |  |  |  |",
        "| `histogram.bin_ct` | replicated: the algorithm runs over all of its data |  |  |  |",
    ):
        assert f"{row}\n" in done.output
    (mm,) = [line for line in done.output.splitlines() if line.startswith("| `mm` |")]
    assert "S(0) R -> S(0); S(1) S(0) -> P; R S(1) -> S(1) | self, mat2 |" in mm
    if torch.__version__.startswith("2.13."):  # of whose operators the page is
        assert done.output == PAGE.read_text(), "write: python -m dtensor operators > docs/operators.md"


def test_a_family_is_the_module_of_the_rule_or_of_its_pattern():
    assert family_of(ops.aten.mm.default) == "matmul"
    assert family_of(ops.aten.avg_pool2d.default) == "spatial"
    assert family_of(ops.aten.exp.default) == "pointwise"
