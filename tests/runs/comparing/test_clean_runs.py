"""Between clean runs nothing is reported: one device against every plan, in float32 and bfloat16."""

import pytest
import torch

from dtensor.runs.comparing.report import report

from . import programs


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Folder of the record on one device, by plan, dtype and seed."""
    made = {}

    def of(plan, dtype, seed):
        make = programs.MODELS.get(plan, programs.transformer)
        if (make, dtype, seed) not in made:
            folder = made[make, dtype, seed] = tmp_path_factory.mktemp("one")
            programs.on_one_device(make(seed, dtype), programs.batch(seed), folder)
        return made[make, dtype, seed]

    return of


IN_BFLOAT16 = ("tp", "fsdp")
"""Also by day: sums over ranks of activations and of gradients."""

LATE = ("hsdp", "2d")
"""By night: plans of four ranks."""


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        *(
            pytest.param(plan, torch.float32, id=f"{plan}-float32", marks=[pytest.mark.nightly] if plan in LATE else [])
            for plan in programs.PLANS
        ),
        *(
            pytest.param(
                plan,
                torch.bfloat16,
                id=f"{plan}-bfloat16",
                marks=[] if plan in IN_BFLOAT16 else [pytest.mark.nightly],
            )
            for plan in programs.PLANS
        ),
    ],
)
def test_nothing_is_reported(plan, dtype, reference, tmp_path):
    check(plan, dtype, 0, reference, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("plan", programs.PLANS)
def test_nothing_is_reported_for_other_seeds(plan, dtype, seed, reference, tmp_path):
    check(plan, dtype, seed, reference, tmp_path)


def check(plan, dtype, seed, reference, tmp_path):
    programs.sharded(plan, programs.model_for(plan, seed, dtype), programs.batch(seed), tmp_path)
    found = programs.compared(reference(plan, dtype, seed), tmp_path)
    assert not found.findings, report(found)
    assert len(found.pairs) > 900
    assert sum([not p.differences for p in found.pairs]) < 30
