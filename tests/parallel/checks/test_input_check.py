"""Ranks of a tensor parallel axis that are given other inputs: an error on all, and none where they are alike."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import AgreementError, Replicate, Shard, init_device_mesh
from dtensor.job.job import job
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from dtensor.testing import with_ranks

WAYS = {
    "eager": None,
    "compiled": {"backend": "dtensor", "options": {"inner": "aot_eager"}},
    "inductor": {"backend": "dtensor"},
    "plain": {"backend": "inductor"},
}


class Model(nn.Module):
    """Nothing in it stays plain under the plan, so no gradient of a plain parameter tells."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, tokens, *, gate=None):
        x = self.embed(tokens)
        x = x if gate is None else x * gate
        return x + self.b(self.a(self.norm(x)).relu())


PLAN = {
    "embed": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "a": ColwiseParallel(input_layouts=Shard(1)),
    "b": RowwiseParallel(output_layouts=Shard(1)),
}


def built(mesh, how, plan=PLAN, **options):
    torch.manual_seed(0)
    model = parallelize_module(Model(), mesh, plan, **options)
    return model, model if WAYS[how] is None else torch.compile(model, **WAYS[how])


def step(run, tokens):
    loss = run(tokens).square().mean()
    if torch.is_grad_enabled():
        loss.backward()


def steps(run, batches):
    """A rank that came first learns of another's failure when it next waits."""
    for batch in batches:
        step(run, batch)


def heard(run, x):
    """One call, and what the job tells soon after."""
    run(x)
    time.sleep(1)
    job().check()


def tokens(seed):
    return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))


def by_day(*ways, late=("inductor",)):
    """Ways, some of which are of the night: `backend="dtensor"` under Inductor, as "plain" has Inductor and "compiled"
    the backend."""
    return [pytest.param(how, marks=[pytest.mark.nightly] if how in late else []) for how in ways]


@pytest.mark.parametrize("how", by_day(*WAYS))
@with_ranks(2)
def test_other_batches_are_an_error_on_all_ranks(rank, how):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if how != "plain":  # where a rank that waits for one that raised is not told why
        _, run = built(mesh, how, check_inputs=False)
        steps(run, [tokens(rank)] * 3)
        torch.compiler.reset()
    _, run = built(mesh, how)
    with (
        torch.set_grad_enabled(how != "plain"),  # for which Inductor would make a backward, too
        pytest.raises(AgreementError, match=r"0 and 1 differ in the values of a torch.int64 \[2, 8\].*of embed"),
    ):
        steps(run, [tokens(rank)] * 3)


@pytest.mark.parametrize("how", by_day("eager", "compiled", "inductor", late=("eager", "inductor")))
@with_ranks(2)
def test_the_same_batches_train_and_a_later_difference_is_seen(rank, how):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    _, run = built(mesh, how)
    steps(run, map(tokens, range(30)))
    with pytest.raises(AgreementError, match="differ in the values"):
        steps(run, [tokens(1000 * rank + seed) for seed in range(230)])


@with_ranks(2)
def test_sizes_and_floats_and_what_is_no_input(rank):
    """Other sizes; rounding, which is no difference; parts, which are to differ; what is computed before a style."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    linear = {"": ColwiseParallel()}
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    doubled = parallelize_module(nn.Linear(16, 8, dtype=torch.float64), mesh, linear)
    doubled(x.double()), doubled.bfloat16()(x.bfloat16())
    nearly = x * (1 + 1e-6 * rank)
    for compiled in (False, True):
        run = parallelize_module(nn.Linear(16, 8), mesh, linear)
        part = parallelize_module(nn.Linear(16, 8), mesh, {"": ColwiseParallel(input_layouts=Shard(0))})
        run, part = (
            torch.compile(m, backend="dtensor", options={"inner": "aot_eager"}) if compiled else m for m in (run, part)
        )
        for _ in range(3):
            run(nearly), part(x + rank)
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True)
    model = parallelize_module(nn.Sequential(nn.Linear(16, 8)), mesh, {"0": prepared})
    with pytest.raises(AgreementError, match=r"differ in torch.float32 \[4, 16\] and torch.float32 \[8, 16\].*of 0\."):
        heard(model, torch.ones(4 + 4 * rank, 16))


@pytest.mark.nightly
@with_ranks(2)
def test_a_graph_looks_at_what_a_taken_value_is_computed_from(rank):
    """The gate is used before the style takes the product; of two inputs the one that differs is found."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Module()
    model.table, model.a, model.b = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)
    parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})

    @torch.compile(backend="dtensor", options={"inner": "aot_eager"})
    def run(tokens, gate, targets):
        x = model.table(tokens) * gate
        return F.mse_loss(model.b(model.a(x).relu()), targets)

    gate, targets = torch.full((16,), torch.nan), torch.zeros(2, 8, 16)
    run(tokens(0), gate, targets + rank)  # targets are taken by no style, and NaN is like NaN
    with pytest.raises(AgreementError, match=r"a torch.float32 \[16\] .*the input of a \("), torch.no_grad():
        run(tokens(0), torch.ones(16) + rank, targets)  # another graph is looked at the first time
