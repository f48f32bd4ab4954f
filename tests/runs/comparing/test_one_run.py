"""What a record tells by itself: NaN, replicas that differ."""

import torch

from dtensor.runs.comparing.comparison import check
from dtensor.runs.comparing.report import report_of_one
from dtensor.runs.comparing.values import load

from . import faults, programs


def test_a_healthy_run(tmp_path):
    programs.sharded("sp", programs.transformer(), programs.batch(), tmp_path)
    found = check(load(tmp_path))
    assert not found.findings
    assert "no operator makes NaN" in report_of_one(found)


def test_the_first_operator_that_makes_a_nan(tmp_path):
    inject = faults.operator("gelu", 1, lambda x: x.fill_(torch.nan), (1,))
    programs.sharded("sp", programs.transformer(), programs.batch(), tmp_path, inject)
    found = check(load(tmp_path)).first
    assert (found.what, found.value.module, found.value.op) == ("nonfinite", "layers.1.feed_forward.gelu", "gelu")
    assert found.ranks == (1,)


def test_a_replica_that_differs(tmp_path):
    inject = faults.weight("layers.1.ffn_norm.weight", faults.bit_flip, (1,))
    programs.sharded("sp", programs.transformer(), programs.batch(), tmp_path, inject)
    found = check(load(tmp_path)).first
    assert (found.what, found.value.module) == ("replicas", "layers.1.ffn_norm.weight")
    assert found.ranks == (0, 1)
