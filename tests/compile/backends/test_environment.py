"""The environment variables that stand for options in plain `torch.compile`; on a fake process group."""

from dataclasses import fields

import pytest
import torch
from torch._inductor.utils import fresh_cache

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile import Options, statistics
from dtensor.dispatch import strictness
from dtensor.program import environment
from dtensor.tensor import plain_passes as hooks

S0, S1 = Shard(0), Shard(1)


@pytest.fixture
def x(fake_mesh):
    return distribute_tensor(torch.ones(4), fake_mesh(2), [S0])


def there_and_back(x):
    return x.redistribute(placements=[Replicate()]).redistribute(placements=[S0]) + 1


def collectives(x):
    """The records of a compilation by plain `torch.compile`, and the collectives that its graph is left with."""
    torch.compiler.reset()
    with statistics() as s:
        torch.compile(there_and_back, fullgraph=True)(x)
    return len(s.records), [c.op for c in s.forward]


def test_there_is_a_variable_for_each_option():
    assert [*environment.VARIABLES, "inner"] == [
        *(
            "passes",
            "disable",
            "strict",
            "dump",
            "verify",
            "memory_budget",
            "split_batch",
            "agreement",
            "decide",
            "inner",
        )
    ]
    whole_steps = {"memory"}  # of `dtensor.compile.step`, which has no plain form
    assert {*environment.VARIABLES, "inner"} == {f.name for f in fields(Options)} - whole_steps
    assert all(variable in str(environment.__doc__) for variable in environment.VARIABLES.values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"disable": ("raise",)}),
        ({"DTENSOR_PASSES": "1", "DTENSOR_DUMP": "", "DTENSOR_VERIFY": " "}, {"disable": ("raise",)}),
        (
            {"DTENSOR_DISABLE": "reduce_after_view, reduce_after_scale,"},
            {"disable": ("raise", "reduce_after_view", "reduce_after_scale")},
        ),
        ({"DTENSOR_PASSES": "raise,lower"}, {"passes": ("raise", "lower")}),
        ({"DTENSOR_MEMORY_BUDGET": "4096"}, {"disable": ("raise",), "memory_budget": 4096}),
        ({"DTENSOR_SPLIT_BATCH": "2"}, {"disable": ("raise",), "split_batch": 2}),
        ({"DTENSOR_PASSES": "lower", "DTENSOR_DISABLE": "lower"}, {"passes": ("lower",), "disable": ("lower",)}),
        (
            {"DTENSOR_VERIFY": "1", "DTENSOR_STRICT": "1", "DTENSOR_AGREEMENT": "0", "DTENSOR_DUMP": "/tmp"},
            {"verify": True, "strict": True, "agreement": False, "dump": "/tmp", "disable": ("raise",)},
        ),
        ({"DTENSOR_VERIFY": "0", "DTENSOR_STRICT": "0", "DTENSOR_AGREEMENT": "1"}, {"disable": ("raise",)}),
    ],
)
def test_what_the_variables_say(monkeypatch, given, expected):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Options.of_environment() == Options(**expected)


BAD = {
    "DTENSOR_VERIFY": ("yes", "the environment variable DTENSOR_VERIFY is 'yes'; write 0 or 1, or leave it unset"),
    "DTENSOR_AGREEMENT": ("off", "the environment variable DTENSOR_AGREEMENT is 'off'; write 0 or 1"),
    "DTENSOR_STRICT": ("2", "the environment variable DTENSOR_STRICT is '2'; write 0 or 1"),
    "DTENSOR_DISABLE": (
        "bukket",
        r"unknown pass 'bukket' in the environment variable DTENSOR_DISABLE; did you mean 'bucket'\?",
    ),
    "DTENSOR_PASSES": ("no", "unknown pass 'no' in the environment variable DTENSOR_PASSES"),
    "DTENSOR_MEMORY_BUDGET": (
        "1GB",
        "the environment variable DTENSOR_MEMORY_BUDGET is '1GB'; write a number of bytes",
    ),
    "DTENSOR_SPLIT_BATCH": ("0", "the environment variable DTENSOR_SPLIT_BATCH is a number of microbatches, got 0"),
    "DTENSOR_DECIDE": ("no", "the environment variable DTENSOR_DECIDE is 'no'; write 0 or 1"),
    "DTENSOR_DUMP": (__file__, "the environment variable DTENSOR_DUMP is the path of a folder, but .* is a file"),
}


@pytest.mark.parametrize("name", environment.VARIABLES.values())
def test_bad_values_end_in_one_error(x, monkeypatch, name):
    """And leave alone what has no DTensor in it."""
    value, message = BAD[name]
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        Options.of_environment()
    assert torch.compile(torch.relu)(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(Exception, match=message):
        torch.compile(there_and_back, fullgraph=True)(x)


def test_passes_of_plain_compile(x, monkeypatch):
    assert collectives(x) == (1, [])
    monkeypatch.setenv("DTENSOR_DISABLE", "cancel_gather_shard")
    assert collectives(x) == (2, ["all_gather"])
    monkeypatch.setenv("DTENSOR_PASSES", "0")
    assert collectives(x) == (0, [])


def test_dump_of_plain_compile(x, monkeypatch, tmp_path):
    """Also where the compiled code lies in the caches."""
    with fresh_cache():
        for folder in ("", str(tmp_path), str(tmp_path)):
            torch.compiler.reset()
            monkeypatch.setenv("DTENSOR_DUMP", folder)
            torch.compile(there_and_back, fullgraph=True)(x)
    names = sorted(f"{path.parent.name}/{path.name}" for path in (tmp_path / "rank0").glob("*/[0-9]*.txt"))
    stages = ("02_joint.00_input", "02_joint.01_cancel_gather_shard")
    assert names == [f"{k:03}_there_and_back/{stage}.txt" for k in range(2) for stage in stages]


def test_verify_of_plain_compile(x, monkeypatch):
    monkeypatch.setenv("DTENSOR_VERIFY", "1")
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr("dtensor.compile.backends.run_passes.simulation", lambda graph, where: seen.append(where))
        assert collectives(x) == (1, [])
        assert seen == ["joint"]
    assert collectives(x) == (1, [])


def test_strict_of_whatever_is_compiled(x, monkeypatch):
    """Every backend, Dynamo's own look at shapes included; eager code is left alone, and so is a decision's price."""
    w = distribute_tensor(torch.ones(16, 32), x.device_mesh, [S1])
    y = distribute_tensor(torch.ones(8, 16), x.device_mesh, [S0])
    with fresh_cache():
        for options in ({}, {"backend": "aot_eager"}, {"backend": "dtensor", "options": {"inner": "aot_eager"}}):
            torch.compiler.reset()
            monkeypatch.setenv("DTENSOR_STRICT", "0")
            assert torch.compile(torch.mm, **options)(y, w).placements == (S1,)
            torch.compiler.reset()
            monkeypatch.setenv("DTENSOR_STRICT", "1")
            assert not strictness.active()
            assert torch.mm(y, w).placements == (S1,)
            with pytest.raises(Exception, match=r"write self.redistribute\(placements=\[Replicate\(\)\]\) first"):
                torch.compile(torch.mm, **options)(y, w)


def test_keys_of_compiled_code(monkeypatch):
    """Each variable makes another key; what is dumped or replayed has none."""
    passes = hooks.PlainPasses(hooks.STAGES[0])
    keys = [passes.uuid()]
    for name, value in (("DISABLE", "reduce_after_view"), ("PASSES", "0"), ("AGREEMENT", "0"), ("STRICT", "1")):
        monkeypatch.setenv(f"DTENSOR_{name}", value)
        keys.append(passes.uuid())
    assert len({repr(key) for key in keys}) == 5
    for name, value in (("DUMP", "x"), ("VERIFY", "1")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"DTENSOR_{name}", value)
            assert passes.uuid() is None
