"""Random programs, compiled for each rank in turn: all ranks communicate alike, whatever their local sizes.

Nothing runs on real ranks, so a program takes no longer than its compilations, and a difference is found whether or not
the ranks would meet it.
"""

import pytest
import torch
from hypothesis import given, seed, settings

from dtensor import init_device_mesh
from dtensor.compile.agreement import overheard
from dtensor.compile.ranks import disagreement
from dtensor.testing import fake_ranks
from tests.fuzz.building import build
from tests.fuzz.judging import accepted
from tests.fuzz.operators import BUILDERS
from tests.fuzz.program import differentiated, function_of, total
from tests.fuzz.recipes import cases
from tests.fuzz.running import given_on
from tests.fuzz.script import script
from tests.fuzz.test_eager import PARTS, QUIET, first_seed, programs


def told(program, setting, rank):
    """What the graphs of one rank communicate, in order."""
    torch.compiler.reset()
    with fake_ranks(setting.ranks, rank), overheard() as heard:
        mesh = init_device_mesh("cpu", setting.mesh)
        fn = torch.compile(
            function_of(program.source),
            backend="dtensor",
            fullgraph=True,
            dynamic=setting.dynamic,
            options=dict(setting.options),
        )
        for batch in (None, *setting.batches):
            inputs, modules = given_on(program, mesh, batch)
            outputs = fn(*inputs, *modules)
            leaves = [x for x in inputs if x.requires_grad] + [p for m in modules for p in m.parameters()]
            differentiated(total(outputs), leaves, twice=False)
    torch.compiler.reset()
    return heard


def judge(case):
    recipe, setting = case
    program = build(recipe, BUILDERS)
    if not program.lines or not accepted(program, False):
        return
    found = disagreement({rank: told(program, setting, rank) for rank in range(setting.ranks)})
    assert found is None, f"{found}\n\n{script(program, setting, found)}"


@pytest.fixture(autouse=True)
def _nobody_to_agree_with(monkeypatch):
    monkeypatch.setenv("DTENSOR_AGREEMENT", "0")


@settings(QUIET, derandomize=True, max_examples=4)
@given(case=cases("compiled"))
def test_programs_for_all_ranks(case):
    judge(case)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", ["compiled", "dynamic"])
def test_many_programs_for_all_ranks(part, kind):
    @seed(first_seed() + part)
    @settings(QUIET, max_examples=max(programs() // PARTS // 20, 1))
    @given(case=cases(kind))
    def run(case):
        judge(case)

    run()
