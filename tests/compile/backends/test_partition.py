"""What is saved for the backward and what is gathered again, in models sharded fully and under checkpointing."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.tensor import plain_passes as hooks
from dtensor.testing import with_ranks
from dtensor.torch_private.compiling import CustomPartitionerFn, inductor_config
from dtensor.torch_private.partitioning import min_cut_partition

LAYERS, WIDTH = 3, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def fully_sharded(mesh):
    """A model whose parameters are all sharded, and the function that gathers each for its use."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))

    def run(x):
        whole = {name: p.redistribute(placements=[Replicate()]) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, whole, (x,))

    return model, run


def data(mesh, rows=8):
    torch.manual_seed(1)
    return distribute_tensor(torch.randn(rows, WIDTH), mesh, [Shard(0)])


def ops(found):
    return Counter(c.op for c in found)


def compiled(f, **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options=options)


# Each weight is read by the backward, but for the first norm's, as there is no gradient of the input; the last two are
# still there.
READ = 3 * LAYERS - 1 - 2


OPTIONS = [({}, READ), ({"disable": ["regather"]}, 0), ({"memory_budget": 10**9}, 0)]


@pytest.mark.parametrize(
    ("inner", "options", "again"),
    [
        *[("aot_eager", *given) for given in OPTIONS],
        *[pytest.param("inductor", *given, marks=pytest.mark.nightly) for given in OPTIONS],
    ],
)
def test_parameters_are_gathered_again(fake_mesh, inner, options, again):
    mesh = fake_mesh(4)
    _, run = fully_sharded(mesh)
    options = {**options, "disable": [*options.get("disable", []), "bucket"]}
    with statistics() as s:
        compiled(run, inner=inner, **options)(data(mesh)).sum().backward()
    assert ops(s.forward) == {"all_gather": 3 * LAYERS}
    assert ops(s.backward) == {"reduce_scatter": 3 * LAYERS, **({"all_gather": again} if again else {})}


@pytest.mark.nightly
def test_plain_compile_partitions_alike(fake_mesh):
    mesh = fake_mesh(4)
    _, run = fully_sharded(mesh)
    with statistics() as s:
        torch.compile(run, fullgraph=True)(data(mesh)).sum().backward()
    # So small that they travel together.
    assert ops(s.backward) == {"all_gather": 1, "reduce_scatter": 1}
    again, scattered = (next(c.bytes for c in s.backward if c.op == op) for op in ("all_gather", "reduce_scatter"))
    kept = 2 * 4 * WIDTH * WIDTH * 4 * 3 // 4  # up and down of the last layer, which each of 4 ranks would send 3/4 of
    assert kept < scattered - again < kept + 4 * WIDTH


def test_an_input_that_is_no_parameter_is_gathered_once(fake_mesh):
    mesh = fake_mesh(4)
    weight = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(1)]))

    def run(x):
        return x.redistribute(placements=[Replicate()]) @ weight

    for budget, again in ((None, 0), (0, 1)):
        torch.compiler.reset()
        with statistics() as s:
            compiled(run, inner="aot_eager", memory_budget=budget)(data(mesh)).sum().backward()
        assert ops(s.forward) == {"all_gather": 1}
        assert ops(s.backward) == ({"all_gather": again} if again else {})


class Counted(CustomPartitionerFn):
    """Counts the marks in the graphs that it is asked to divide."""

    def __init__(self):
        self.marks = []

    def __call__(self, gm, joint_inputs, **kwargs):
        self.marks.append(sum([n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE for n in gm.graph.nodes]))
        return min_cut_partition(gm, joint_inputs, **kwargs)

    def uuid(self):
        return "counted"


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["inductor", "dtensor"])
def test_another_partitioner_is_asked_after_ours(fake_mesh, backend):
    mesh, mine = fake_mesh(4), Counted()
    _, run = fully_sharded(mesh)
    with inductor_config.patch(custom_partitioner_fn=mine):
        hooks.install()
        hooks.install()
        with statistics() as s:
            torch.compile(run, backend=backend, fullgraph=True)(data(mesh)).sum().backward()
    assert [n >= READ for n in mine.marks] == [True]
    assert ops(s.backward)["all_gather"] == 1


class Block(nn.Module):
    """Column-wise, then row-wise: one sum over ranks at its end, and one in its backward."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]))

    def forward(self, x):
        return (torch.relu(x @ self.up) @ self.down).redistribute(placements=[Replicate()])


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_checkpointing_recomputes_what_is_read_and_leaves_nothing_dead(fake_mesh, inner):
    mesh = fake_mesh(2)
    blocks = nn.ModuleList([Block(mesh) for _ in range(LAYERS)])

    def run(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = distribute_tensor(torch.randn(8, WIDTH), mesh, [Replicate()])
    with statistics() as s:
        compiled(run, inner=inner)(x).sum().backward()
    assert ops(s.forward) == {"all_reduce": LAYERS}
    # Between regions the results are saved, so no sum is done again; the input needs no gradient.
    assert ops(s.backward) == {"all_reduce": LAYERS - 1}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        pytest.param(7, {"inner": "aot_eager", "memory_budget": 4000}, id="budget"),
        pytest.param(8, {"inner": "aot_eager", "memory_budget": 4000}, id="even", marks=pytest.mark.nightly),
        pytest.param(7, {"inner": "inductor"}, id="inductor", marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_numbers_on_real_ranks(rank, rows, options):
    mesh = init_device_mesh("cpu", (2,))
    model, run = fully_sharded(mesh)
    x = data(mesh, rows)
    run(x).square().sum().backward()
    expected = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    compiled(run, **options)(x).square().sum().backward()
    for p, want in zip(model.parameters(), expected, strict=True):
        assert p.grad.placements == (Shard(0),)
        torch.testing.assert_close(p.grad.full_tensor(), want, atol=1e-4, rtol=1e-4)


@with_ranks(2)
def test_numbers_under_checkpointing_on_real_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))
    block = Block(mesh)
    x = distribute_tensor(torch.randn(8, WIDTH), mesh, [Replicate()])

    def run(x):
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    run(x).sum().backward()
    expected = [p.grad.full_tensor() for p in block.parameters()]
    block.zero_grad()
    compiled(run, inner="aot_eager")(x).sum().backward()
    for p, want in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), want, atol=1e-4, rtol=1e-4)
