"""`fully_shard` beside tensor and sequence parallel styles, on two and three axes, in either order."""

import copy

import pytest
import torch
import torch.nn.functional as F

from dtensor import Shard, init_device_mesh
from dtensor.errors import MeshError
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module
from dtensor.testing import ModelArgs, Transformer, with_threads

ARGS = ModelArgs(dropout_p=0.0, vocab_size=13, max_seq_len=8, n_layers=2, dim=12, n_heads=2, weight_tying=False)

torch.manual_seed(0)
MODEL = Transformer(ARGS)
TOKENS = torch.randint(0, 13, (8, 8))


def loss(model, t):
    return F.cross_entropy(model(t).flatten(0, 1), t.flatten())


def expected():
    model = copy.deepcopy(MODEL)
    loss(model, TOKENS).backward()
    return {name: p.grad for name, p in model.named_parameters()}


WANTED = expected()


def sharded(mesh, data, order, sequence, **options):
    model = copy.deepcopy(MODEL)
    for word in order.split(", "):
        if word == "styles":
            Transformer.parallelize(model, mesh["tp"], sequence)
        else:
            for layer in model.layers:
                fully_shard(layer, mesh[data], **options)
                assert layer.feed_forward.w1.weight.device_mesh is model.layers[0].feed_forward.w1.weight.device_mesh
            fully_shard(model, mesh[data], **options)
    return model


def part(mesh, data):
    index, count = 0, 1
    for name in data:
        index, count = index * mesh[name].size() + mesh.get_local_rank(name), count * mesh[name].size()
    return TOKENS.chunk(count)[index]


def check(mesh, data, model):
    assert [name for name, _ in model.named_parameters()] == [*WANTED]
    loss(model, part(mesh, data)).backward()
    for name, p in model.named_parameters():
        # The layout and not its placements, which do not tell which of two axes cuts a dimension first.
        assert p.grad._spec.layout is p._spec.layout, name
        torch.testing.assert_close(p.grad.full_tensor(), WANTED[name])
        torch.testing.assert_close(p.full_tensor(), MODEL.get_parameter(name))


ORDERS = ["styles, full", "full, styles"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("names", "sequence"),
    [
        (("dp", "tp"), True),
        (("tp", "dp"), False),
        pytest.param(("dp", "tp"), False, marks=pytest.mark.nightly),
        pytest.param(("tp", "dp"), True, marks=pytest.mark.nightly),
    ],
)
@with_threads(4)
def test_two_axes(rank, order, sequence, names):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = sharded(mesh, ("dp",), order, sequence)
    dp = names.index("dp")
    layout = model.layers[0].attention.wq.weight._spec.layout
    assert layout.dims == ((1 - dp, dp), ())  # the style cuts first, whichever came first
    check(mesh, ("dp",), model)


@pytest.mark.parametrize("order", ORDERS)
@with_threads(4)
def test_different_dimensions(rank, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(mesh, ("dp",), order, False, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    assert model.layers[0].attention.wq.weight._spec.layout.dims == ((1,), (0,))
    assert model.layers[0].attention.wo.weight._spec.layout.dims == ((), (1, 0))
    check(mesh, ("dp",), model)


@pytest.mark.parametrize(
    ("order", "sequence"),
    [
        pytest.param(order, sequence, marks=[] if sequence and order == ORDERS[0] else pytest.mark.nightly)
        for order in ORDERS
        for sequence in (False, True)
    ],
)
@with_threads(8)
def test_three_axes(rank, order, sequence):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = sharded(mesh, ("replicate", "shard"), order, sequence)
    assert model.layers[0].attention.wq.weight._spec.layout.dims == ((2, 1), ())
    check(mesh, ("replicate", "shard"), model)


@with_threads(8)
def test_two_axes_of_three(rank):
    """The parameters lie on a slice of the mesh, always the same one."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    model = sharded(mesh, ("dp",), "styles, full", True)
    meshes = {id(p.device_mesh) for p in model.parameters()}
    assert len(meshes) == 1
    assert model.norm.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    check(mesh, ("dp",), model)


@with_threads(4)
def test_checkpointed_activations(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(mesh, ("dp",), "styles, full", True)
    model.checkpoint_activations = True
    check(mesh, ("dp",), model)


@with_threads(4)
def test_accumulation(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sharded(mesh, ("dp",), "styles, full", True)
    model.set_requires_gradient_sync(False)
    loss(model, part(mesh, ("dp",))).backward()
    model.set_requires_gradient_sync(True)
    loss(model, part(mesh, ("dp",))).backward()
    for name, p in model.named_parameters():
        assert p.grad._spec.layout is p._spec.layout, name
        torch.testing.assert_close(p.grad.full_tensor(), WANTED[name].mul(2))


@with_threads(4)
def test_meshes_that_do_not_go_together(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    with pytest.raises(MeshError, match="because they are not slices of one mesh; write mesh = init_device_mesh"):
        fully_shard(model, other["dp"])
    with pytest.raises(MeshError, match="is already on axis tp of the mesh"):
        fully_shard(model, mesh["tp"])
    fully_shard(model, mesh["dp"])
    with pytest.raises(MeshError, match="beside its data axes; parallelize a module once"):
        model.redistribute_parameter("weight", lambda p: p)
