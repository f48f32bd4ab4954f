"""Compiled runs on two real ranks: nothing is reported between clean ones, and what is wrong in one is named."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtensor
from dtensor.passes.functional.lower import Lower
from dtensor.passes.graph import ir
from dtensor.runs.comparing.report import report
from dtensor.testing import with_ranks
from dtensor.testing.models import ModelArgs, Transformer

from . import programs


@pytest.fixture
def on_one_device(tmp_path, request):
    """Make the record on one device, in this process, before the ranks run."""
    given = request.node.callspec.params
    if "dtype" in given:
        model = programs.transformer(0, given["dtype"], given["layers"])
        programs.on_one_device(model, programs.batch(), tmp_path / "one")
    else:
        programs.step(dropping(7), programs.batch(), tmp_path / "one", steps=1)
    return tmp_path


def record(name, folder, dtype=torch.float32, layers=1, compiled=None):
    """Record two steps of a plan; `compiled` are the options of the backend."""
    model, given = programs.PLANS[name][0](programs.transformer(0, dtype, layers), programs.batch(), dist.get_rank())
    run = model if compiled is None else torch.compile(model, backend="dtensor", options=compiled)
    programs.step(model, given, folder, run=run)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
AT_NIGHT = [
    pytest.param(plan, DTYPES[dtype], 2, "inductor", id=f"{plan}-{dtype}", marks=pytest.mark.nightly)
    for plan in ("sp", "fsdp")
    for dtype in DTYPES
]


@pytest.mark.parametrize(
    ("plan", "dtype", "layers", "inner"),
    [
        pytest.param("fsdp", torch.bfloat16, 1, "aot_eager", id="fsdp-bfloat16-aot_eager", marks=pytest.mark.nightly),
        *AT_NIGHT,
    ],
)
@with_ranks(2, timeout=300)
def test_eager_and_compiled_agree(rank, plan, dtype, layers, inner, on_one_device):
    tmp_path = on_one_device
    record(plan, tmp_path / "eager", dtype, layers)
    record(plan, tmp_path / "compiled", dtype, layers, {"inner": inner})
    dist.barrier()
    agree(tmp_path, ("one", "eager"), ("one", "compiled"), ("eager", "compiled"), least=400 * layers)


def agree(folder, *pairs, least):
    """Nothing is reported between the records, in which at least so many values are compared."""
    for a, b in pairs:
        found = programs.compared(folder / a, folder / b)
        assert not found.findings, report(found)
        assert len(found.pairs) > least, (a, b)


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "layers"), [pytest.param(torch.float32, 1, id="sp-float32")])
@with_ranks(2, timeout=300)
def test_passes_on_and_off_agree(rank, dtype, layers, on_one_device):
    tmp_path = on_one_device
    record("sp", tmp_path / "off", compiled={"inner": "aot_eager", "passes": []})
    record("sp", tmp_path / "on", compiled={"inner": "aot_eager"})
    dist.barrier()
    agree(tmp_path, ("one", "on"), ("off", "on"), least=400)


class Small(nn.Module):
    """What Inductor makes few kernels of."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(programs.VOCABULARY, 8)
        self.head = nn.Linear(8, programs.VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens).tanh())


@with_ranks(2, timeout=300)
def test_what_inductor_makes_of_a_small_model_agrees(rank, tmp_path):
    mesh = dtensor.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"*.weight": {"tp": dtensor.Shard(1)}}
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = dtensor.distribute_model(Small(), mesh, plan, outputs={})
        run = torch.compile(model, backend="dtensor") if name == "compiled" else model
        programs.step(model, programs.batch(), tmp_path / name, run=run, steps=1)
    dist.barrier()
    agree(tmp_path, ("eager", "compiled"), least=20)


@with_ranks(2, timeout=300)
def test_a_pass_that_averages(rank, tmp_path):
    """Of a graph in which a reduction is wrong, the gradient that it belongs to is named."""
    record("sp", tmp_path / "eager")
    run = Lower.__call__

    def wrong(self, graph):
        reductions = [n for n in graph.nodes if ir.is_collective(n, "all_reduce") and n.args[1] == "sum"]
        for node in reductions[:1]:
            node.args = (node.args[0], "avg", *node.args[2:])
        return run(self, graph)

    with mock.patch.object(Lower, "__call__", wrong):
        record("sp", tmp_path / "wrong", compiled={"inner": "aot_eager"})
    dist.barrier()
    compared = programs.compared(tmp_path / "eager", tmp_path / "wrong")
    assert compared.first.said == "0.5 times as large", report(compared)
    assert compared.first.value.module.startswith("norm")


def dropping(seed_of_rank):
    torch.manual_seed(0)
    args = ModelArgs(n_layers=1, vocab_size=64, max_seq_len=16, dim=32, n_heads=4, dropout_p=0.25)
    model = Transformer(args)
    torch.manual_seed(seed_of_rank)
    return model


@pytest.mark.parametrize("seeds", [(7, 7), (7, 8)], ids=["same", "other"])
@with_ranks(2, timeout=120)
def test_another_seed_of_dropout(rank, seeds, on_one_device):
    """Ranks draw what one device draws; one that has another seed is named."""
    given, tmp_path = programs.batch(), on_one_device
    mesh = dtensor.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Transformer.parallelize(dropping(seeds[rank]), mesh, use_seq_parallel=False)
    torch.manual_seed(seeds[rank])
    programs.step(model, given, tmp_path / "tp", programs.suspected, steps=1)
    dist.barrier()
    compared = programs.compared(tmp_path / "one", tmp_path / "tp")
    found = compared.first
    if seeds[0] == seeds[1]:
        assert found is None, report(compared)
    else:
        assert found.value.module == "dropout"
        assert found.ranks == (1,)
