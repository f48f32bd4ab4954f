"""Plain tensors in a model that `distribute_model` sharded, other than its inputs: tables that modules hold, globals,
caches that the forward writes to; and modules that are called by themselves."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dtensor import AgreementError, DTensor, MixedTensorError, Shard, distribute_model, init_device_mesh
from dtensor.testing import fake_ranks, with_ranks

PLAN = {"*.up.*": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}, "table.weight": {"tp": Shard(0)}}
HOW = {
    "eager": None,
    "compiled": {"backend": "dtensor", "options": {"inner": "aot_eager"}},
    "inductor": {"backend": "dtensor"},
    "plain": {"backend": "inductor"},
}
SCALE = torch.linspace(0, 1, 8).sin().double()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gates = torch.linspace(-1, 1, 16).cos().double()

    def forward(self, x, positions):
        return x + self.down((self.up(x) * self.gates).relu()) * SCALE + positions[:, :1]


class Model(nn.Module):
    def __init__(self, checkpointed=False, broken=False):
        super().__init__()
        self.table, self.blocks = nn.Embedding(16, 8), nn.ModuleList([Block(), Block()])
        self.turns = [torch.linspace(0, 3, 16).view(16, 1).double()]
        self.checkpointed, self.broken = checkpointed, broken

    def forward(self, tokens):
        positions = self.turns[0][torch.arange(tokens.shape[1])]
        x = self.table(tokens) * self.turns[0][: tokens.shape[1]]
        for block in self.blocks:
            if self.broken:
                torch._dynamo.graph_break()
            x = checkpoint(block, x, positions, use_reentrant=False) if self.checkpointed else block(x, positions)
        return (x * self.turns[0][tokens]).square().mean()


class Cached(nn.Module):
    """Writes what it computes to a cache, in three ways, and reads that."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x, at, cache):
        y = self.up(x)
        cache["kept"].index_copy_(1, at, y)
        cache["last"][:, :1] = y[:, -1:]
        cache["sum"] += y.sum(1)
        return (cache["kept"] * 2)[:, :5] + cache["last"] + cache["sum"][:, None] + y[:, :1]


def made(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def distributed(plain, plan=PLAN, **options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return distribute_model(copy.deepcopy(plain), mesh, plan, outputs={}, **options)


def runner(model, how):
    torch.compiler.reset()
    return model if HOW[how] is None else torch.compile(model, **HOW[how])


def thrice(run, x):
    """A rank that came first learns of another's failure when it next waits."""
    for _ in range(3):
        run(x)


TOKENS = torch.arange(10).view(2, 5) * 3 % 16


OPTIONS = [{}, {"checkpointed": True}, {"broken": True}, {"checkpointed": True, "broken": True}]


@pytest.mark.parametrize(
    ("options", "how"),
    [
        *((options, "eager") for options in OPTIONS),
        *((options, "compiled") for options in (OPTIONS[0], OPTIONS[-1])),
        *(pytest.param(options, how, marks=pytest.mark.nightly) for options in OPTIONS for how in HOW),
    ],
)
@with_ranks(2)
def test_tables_of_modules_and_globals(rank, options, how):
    plain = made(**options)
    model = distributed(plain)
    run = runner(model, how)
    for _ in range(2):
        loss, expected = run(TOKENS), plain(TOKENS)
        torch.testing.assert_close(loss, expected)
        loss.backward(), expected.backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("how", ["eager", "compiled", *(pytest.param(h, marks=pytest.mark.nightly) for h in HOW)])
@with_ranks(2)
def test_tables_that_differ_are_an_error_on_all_ranks(rank, how):
    plain = made()
    plain.blocks[1].gates = plain.blocks[1].gates + rank / 2
    unchecked = runner(distributed(plain, check_inputs=False), how)
    unchecked(TOKENS)
    run = runner(distributed(plain), how)
    where = "aten.mul.Tensor" if how == "eager" else "blocks.1"
    message = rf"0 and 1 differ in the values of a torch.float64 \[16\] .*{where} \(\S*test_held_tensors.py:\d+\)"
    with pytest.raises(AgreementError, match=message):
        thrice(run, TOKENS)


@pytest.mark.parametrize("how", ["eager", "compiled", *(pytest.param(h, marks=pytest.mark.nightly) for h in HOW)])
@with_ranks(2)
def test_caches(rank, how):
    torch.manual_seed(0)
    plain = Cached().double()
    run = runner(distributed(plain, {"up.weight": {"tp": Shard(0)}}), how)
    ours, theirs = ({"kept": torch.zeros(2, 6, 4).double(), "last": torch.ones(2, 1, 4).double()} for _ in range(2))
    for cache in (ours, theirs):
        cache["sum"] = torch.zeros(2, 4).double()
    with torch.no_grad():
        for step in range(3):
            x = torch.sin(torch.arange(32.0).double() * (step + 1)).view(2, 2, 8)
            at = torch.tensor([2 * step, 2 * step + 1])
            torch.testing.assert_close(run(x, at, ours), plain(x, at, theirs))
    assert not any(isinstance(x, DTensor) for x in ours.values())
    torch.testing.assert_close(ours, theirs)


def added_by_index(x, y):
    return torch.zeros(x.shape[0], 8).double().index_add_(0, torch.tensor([2, 0, 1]), y)


def set_in_parts(x, y):
    out = torch.zeros(x.shape[0], 8).double()
    out[:, :4], out[:, 4:] = y[:, :4], y[:, 4:] * 2
    return out


def set_by_index(x, y):
    out = torch.ones(x.shape[0], 8).double()
    out[torch.tensor([0, 2])] = y[:2].sin()
    return out * y


def added(x, y):
    out = torch.zeros(x.shape[0], 8).double()
    for k in range(3):
        out += y * k
    return out.relu() + out


def masked(x, y):
    out = torch.ones(x.shape[0], 8).double()
    out.masked_fill_(y.detach() > 0, 0.5)
    return out * y


def scattered(x, y):
    places = torch.arange(8).expand(x.shape[0], 8).flip(1)
    return torch.zeros(x.shape[0], 8).double().scatter_(1, places, y) + 1


def of_experts(x, y):
    """As mixtures of experts were written: each adds its rows."""
    out, best = torch.zeros(x.shape[0], 8).double(), y.detach().argmax(-1)
    for expert in range(8):
        (rows,) = torch.where(best == expert)
        out.index_add_(0, rows, y[rows] * expert)
    return out


WRITTEN = [added_by_index, set_in_parts, set_by_index, added, masked, scattered, of_experts]


class Writing(nn.Module):
    """Writes what it computes to plain tensors that it makes; one of them is a result, and one goes on."""

    def __init__(self, write):
        super().__init__()
        self.up, self.down, self.write = nn.Linear(8, 8), nn.Linear(8, 8), write

    def forward(self, x):
        y = self.up(x)
        return self.write(x, y), self.down(self.write(x, y))


@pytest.mark.parametrize(
    ("how", "writes"),
    [
        ("eager", WRITTEN),
        ("compiled", [set_in_parts, masked, scattered]),  # to views, in place, and with an index
        *(pytest.param(h, WRITTEN, marks=pytest.mark.nightly) for h in HOW),
    ],
)
@with_ranks(2)
def test_gradients_through_what_is_written(rank, how, writes):
    plan = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    x, *weights = (f(torch.arange(24.0).double()).view(3, 8) for f in (torch.sin, torch.cos, torch.tanh))
    for write in writes:
        if write is of_experts and how != "eager":
            continue  # shapes that depend on values
        torch.manual_seed(0)
        plain = Writing(write).double()
        model = distributed(plain, plan)
        found, expected = runner(model, how)(x), plain(x)
        torch.testing.assert_close(found, expected, msg=f"{write.__name__}: {{}}".format)
        for out in (found, expected):
            sum([(y * w).sum() for y, w in zip(out, weights)]).backward()
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{write.__name__}: {{}}".format)


class Shifted(nn.Module):
    """Operators of a plain tensor and a DTensor whose names end as those of operators in place do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.arange(1, 9))
        self.bits = torch.arange(8)

    def forward(self, x):
        y = self.numbers + x
        return OrderedDict(left=self.bits << y % 4, right=self.bits >> y % 3, both=self.bits & y, either=self.bits | y)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@with_ranks(2)
def test_what_only_looks_in_place(rank, how):
    plain, x = Shifted(), torch.arange(8)
    found, expected = runner(distributed(plain, {"numbers": {"tp": Shard(0)}}), how)(x), plain(x)
    assert type(found) is OrderedDict
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_modules_called_by_themselves(rank, how):
    plain = made()
    model = distributed(plain)
    x, positions = torch.sin(torch.arange(80.0).double()).view(2, 5, 8), torch.ones(5, 1).double()
    (ours, _), (theirs, _) = model.blocks.children(), plain.blocks.children()
    block = runner(ours, how)
    torch.testing.assert_close(block(x, positions), theirs(x, positions))
    torch.testing.assert_close(block(positions=positions, x=x), theirs(x, positions))
    run = runner(model, how)
    torch.testing.assert_close(run(TOKENS), plain(TOKENS))


def test_outside_of_a_view_nothing_is_taken():
    with fake_ranks(2):
        model = distribute_model(made(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), PLAN)
        with pytest.raises(MixedTensorError, match="plain tensor of shape \\[16, 8\\]"):
            model.get_parameter("table.weight") + torch.ones(16, 8).double()
        with pytest.raises(MixedTensorError, match="argument 'self' is a plain tensor"):
            torch.ones(16, 8).double().add_(model.get_parameter("table.weight"))


class Taking(nn.Module):
    """Stands a part of a DTensor beside the whole."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x) * (self.up.weight * 1).to_local()[:1]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@with_ranks(2)
def test_parts_of_dtensors_are_not_taken_for_wholes(rank, how):
    run = runner(distributed(Taking(), {"up.weight": {"tp": Shard(0)}}), how)
    with pytest.raises(Exception, match=r"that requires a gradient, other|differ in the values|rank's part"):
        thrice(run, torch.ones(2, 8))


@pytest.mark.parametrize("way", ["annotated", "nested"])
def test_fully_sharded_modules_that_dynamo_may_not_look_into(way):
    """Their class stands for an operator (`allow_in_graph`); what it became under `fully_shard` does not."""
    from dtensor.parallel import fully_shard

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x)

    torch._dynamo.allow_in_graph(Marked)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(Marked(), nn.Linear(8, 8))
        if way == "nested":
            fully_shard(model[0], mesh)
        fully_shard(model, mesh)
        torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})(torch.ones(2, 8))


class Slopes(nn.Module):
    """Derivatives inside the forward, of what takes a vector."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        def f(row):
            return self.up(row).sin()

        rows = torch.func.vmap(torch.func.grad(lambda row: f(row).sum()))(x)
        return torch.func.jacrev(f)(x[0]) + torch.func.jacfwd(f)(x[1]) + rows.sum()


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_derivatives_inside(rank, how):
    torch.manual_seed(0)
    plain = Slopes().double()
    model = distributed(plain, {"up.*": {"tp": Shard(0)}})
    x = torch.sin(torch.arange(32.0).double()).view(4, 8)
    found, expected = runner(model, how)(x), plain(x)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward(), expected.square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


class Flexible(nn.Module):
    """Attention whose scores a function changes, by places and by a table of heads."""

    def __init__(self):
        super().__init__()
        self.up, self.slopes = nn.Linear(8, 24), torch.tensor([0.1, 0.3])

    def forward(self, x):
        q, k, v = self.up(x).view(2, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * self.slopes[h])


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_flex_attention(rank, how):
    """Forward only: torch has no backward of it on the CPU."""
    torch.manual_seed(0)
    plain = Flexible().requires_grad_(False)
    model = distributed(plain, {"up.*": {"tp": Shard(0)}})
    x = torch.sin(torch.arange(64.0)).view(2, 4, 8)
    torch.testing.assert_close(runner(model, how)(x), plain(x))
