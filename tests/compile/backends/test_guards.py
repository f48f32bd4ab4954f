"""What a compiled function asks of its tensors before it runs: all that its graph was made for, and nothing slow."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.layout.layout import Layout
from dtensor.testing import fake_ranks


def ones(mesh, placements, shape=(4, 4), dtype=torch.float32):
    return distribute_tensor(torch.ones(shape, dtype=dtype), mesh, placements)


@pytest.fixture
def world():
    torch.compiler.reset()
    with fake_ranks(4):
        yield init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4, 1))
    torch.compiler.reset()


CHANGES = {
    "other placements": lambda mesh, other: ones(mesh, [Replicate(), Shard(0)]),
    "other dimension": lambda mesh, other: ones(mesh, [Shard(1), Replicate()]),
    "partial": lambda mesh, other: DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Partial()]),
    "other order of cuts": lambda mesh, other: DTensor(
        torch.ones(1, 4), mesh, Layout.parse("S(0)#1S(0)#0", 2), (4, 4), (4, 1)
    ),
    "other mesh": lambda mesh, other: ones(other, [Shard(0), Replicate()]),
    "other shape": lambda mesh, other: ones(mesh, [Shard(0), Replicate()], (8, 4)),
    "other dtype": lambda mesh, other: ones(mesh, [Shard(0), Replicate()], dtype=torch.float64),
    "other global shape of an equal shard": lambda mesh, other: DTensor.from_local(
        torch.ones(2, 4), mesh, [Shard(0), Replicate()], shape=(3, 4), stride=(4, 1)
    ),
    "gradient": lambda mesh, other: ones(mesh, [Shard(0), Replicate()]).requires_grad_(),
    "plain": lambda mesh, other: torch.ones(4, 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_compiled_anew(world, change):
    mesh, other = world
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: x * 2, backend=counter, dynamic=False, fullgraph=True)
    for _ in range(3):
        run(ones(mesh, [Shard(0), Replicate()]))
    assert counter.frame_count == 1
    given = CHANGES[change](mesh, other)
    found = run(given)
    assert counter.frame_count == 2
    expected = given * 2
    assert (type(found), found.shape, found.dtype) == (type(expected), expected.shape, expected.dtype)
    if isinstance(given, DTensor):
        assert (found._spec, found.device_mesh) == (expected._spec, given.device_mesh)
    run(ones(mesh, [Shard(0), Replicate()]))
    run(given)
    assert counter.frame_count == 2


def test_flattening_builds_nothing(world):
    """Guards do it twice for each parameter in every call: what it gives is made once, and equal by identity."""
    mesh, _ = world
    one, two = (ones(mesh, [Shard(0), Replicate()]).__tensor_flatten__() for _ in range(2))
    assert one[0] is two[0]
    assert one[1] is two[1]
    assert not hasattr(DTensor, "__metadata_guard__")
    assert vars(ones(mesh, [Replicate(), Replicate()])) == {}


def test_from_local_is_one_node(world):
    mesh, _ = world
    targets = []

    def backend(gm, _):
        targets.extend(str(n.target) for n in gm.graph.nodes if n.op.startswith("call"))
        return gm

    def run(x):
        return DTensor.from_local(x, mesh, [Shard(0), Partial("avg")], grad_placements=[Shard(0), Replicate()])

    made = torch.compile(run, backend=backend, fullgraph=True)(torch.ones(2, 4, requires_grad=True))
    assert targets == ["dtensor.from_local"]
    assert (made.placements, made.shape) == ((Shard(0), Partial("avg")), (4, 4))


@pytest.mark.parametrize("given", [None, [Shard(0), Replicate()]])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_gradients_of_from_local(world, reduce_op, given):
    mesh, _ = world

    def run(x):
        y = DTensor.from_local(x, mesh, [Shard(0), Partial(reduce_op)], grad_placements=given)
        return (y.redistribute(placements=[Shard(0), Replicate()]) * 3).to_local().sum()

    def gradient(f):
        x = torch.ones(2, 4, requires_grad=True)
        f(x).backward()
        return x.grad

    found = gradient(torch.compile(run, backend="aot_eager", fullgraph=True))
    assert torch.equal(found, torch.full((2, 4), 3.0 if reduce_op == "sum" else 1.5))
    assert torch.equal(found, gradient(run))
