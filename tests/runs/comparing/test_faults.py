"""Faults put into a training step one at a time: the comparison with one device names operator, line and rank."""

import re

import pytest

from . import faults, programs

NAMED_BY_RANK = 48
"""The least number of faults that the table must hold and that must be named."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Folder of the record on one device, by plan and number of steps."""
    made = {}

    def of(plan, steps):
        make = programs.MODELS.get(plan, programs.transformer)
        if (make, steps) not in made:
            folder = made[make, steps] = tmp_path_factory.mktemp("one")
            programs.on_one_device(make(), programs.batch(), folder, steps=steps)
        return made[make, steps]

    return of


@pytest.fixture(autouse=True)
def overridable():
    with faults.overridable():
        yield


BY_DAY = [
    pytest.param(fault, marks=[] if k % 3 == 0 else [pytest.mark.nightly]) for k, fault in enumerate(faults.FAULTS)
]


@pytest.mark.parametrize("fault", BY_DAY, ids=lambda f: f.name)
def test_a_fault_is_named(fault, reference, tmp_path):
    """The sharded run is recorded up to the phase in which something is changed: what comes later is not the first
    difference. What a wrong rule changes may show later."""
    everything = fault.inject is faults.suspected or fault.phase == "optimizer"
    last = "optimizer" if everything else "backward" if fault.phase == "backward" else "forward"
    with fault.process():
        model = programs.model_for(fault.plan)
        programs.sharded(fault.plan, model, programs.batch(), tmp_path, fault.inject, steps=fault.steps, last=last)
    found = programs.compared(reference(fault.plan, fault.steps), tmp_path).first
    assert found is not None, "nothing was reported"
    everyone = tuple(range(programs.ALL[fault.plan][1]))
    assert found.value.op.startswith(fault.op)
    assert not fault.module or found.value.module == fault.module
    assert found.value.phase in ((fault.phase,) if fault.phase else ("forward", "parameter"))
    assert found.ranks == (fault.ranks or found.ranks)
    assert set(found.ranks) <= set(everyone)
    if found.value.phase in ("forward", "backward"):
        assert re.fullmatch(r"\w+\.py:\d+", found.value.line)


def test_the_table_is_long_enough():
    assert len({f.name for f in faults.FAULTS}) == len(faults.FAULTS) >= NAMED_BY_RANK
