"""Plain tensors beside DTensors: those that are alike on all ranks are taken as replicated, all others are refused."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dtensor
from dtensor import DTensor, MixedTensorError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks, with_threads
from dtensor.torch_private.compiling import dynamo_counters

N = 5
PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def values():
    return torch.linspace(-2, 2, N * N).view(N, N)


def causal(x):
    return x.masked_fill(torch.ones(N, N).tril() == 0, float("-inf")).softmax(-1)


def positions(x):
    return x + torch.arange(N)[:, None] * 0.5 - torch.full((N,), 2.0)


def constants(x):
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + torch.eye(N)[2] @ torch.linspace(0, 1, N * N).view(N, N)


def written(x):
    mask = torch.zeros(N, N)
    mask[1].add_(3)
    mask.tril_()
    mask[:, 0] = 7
    return x * mask


def powers(x):
    return x.exp() ** torch.arange(1, N + 1)


def shaped_like(x):
    return x + torch.zeros_like(x.to_local()[:0]).sum(0, keepdim=True).new_ones(N)


def inside(x):
    with dtensor.implicit_replication():
        return positions(x) * 2


INVARIANT = [causal, positions, constants, written, powers, shaped_like, inside]


def dense(fn, x):
    """Value and gradient on one device."""
    x = x.clone().requires_grad_()
    out = (x + torch.ones(N)) if fn is shaped_like else fn(x)
    (out * out.detach().cos()).sum().backward()
    return out.detach(), x.grad


def placed(fn, x, mesh, placement):
    x = distribute_tensor(x, mesh, [placement]).requires_grad_()
    out = fn(x)
    (out * out.detach().cos()).sum().backward()
    return out.detach().full_tensor(), x.grad.full_tensor()


def same(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e)


@pytest.mark.parametrize("fn", INVARIANT, ids=lambda f: f.__name__)
@with_threads(2)
def test_in_a_region(rank, fn):
    mesh = init_device_mesh("cpu", (2,))
    for placement in PLACEMENTS:
        with dtensor.implicit_replication():
            same(placed(fn, values(), mesh, placement), dense(fn, values()))


@with_ranks(2)
def test_a_compiled_graph_is_a_region(rank):
    mesh = init_device_mesh("cpu", (2,))
    for fn in INVARIANT:
        expected = dense(fn, values())
        for placement in PLACEMENTS[:2]:
            torch.compiler.reset()
            compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
            same(placed(compiled, values(), mesh, placement), expected)
            before = dynamo_counters()["stats"]["unique_graphs"]
            with dtensor.implicit_replication():
                same(placed(compiled, values(), mesh, placement), expected)
            assert dynamo_counters()["stats"]["unique_graphs"] == before


@with_ranks(2)
def test_what_a_collective_wrote_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(values(), mesh, [Shard(0)])
    with dtensor.implicit_replication():
        buffer = torch.zeros(N)
        assert torch.equal((x + buffer).full_tensor(), values())
        dist.broadcast(buffer, 0)
        with pytest.raises(MixedTensorError, match="argument 'other' is a plain tensor"):
            x + buffer


@with_threads(2)
def test_what_a_region_made_stays_good_and_what_it_did_not_make_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(values(), mesh, [Shard(0)])
    outside = torch.ones(N)
    with dtensor.implicit_replication():
        made, view = torch.ones(N, N), torch.arange(N * N).view(N, N)[1:3]
        assert torch.equal((x + made).full_tensor(), values() + 1)
        filled = torch.empty(N).fill_(2)
        assert torch.equal((x * filled).full_tensor(), values() * 2)
        for other in (
            outside,
            made[0] + outside,
            torch.rand(N),
            torch.ones(N).normal_(),
            torch.ones(N).copy_(outside),
            torch.ones(N).add_(outside),
            torch.full((), 2.0) * outside,
            outside[0].expand(N),
            x.to_local()[0].detach().clone(),
            torch.ops.dtensor.shard(torch.ones(2 * N), 0, mesh.get_group(0).group_name),
        ):
            with pytest.raises(MixedTensorError, match=rf"argument 'other' is a plain tensor of shape \[{N}\]") as told:
                x + other
            assert "implicit_replication" not in str(told.value), "the program stands in a region"
        with pytest.raises(MixedTensorError, match=r"of shape \[5\] that requires a gradient"):
            x + torch.ones(N, requires_grad=True)
        with pytest.raises(MixedTensorError, match="would write a DTensor into a plain tensor"):
            made.add_(x)
    assert torch.equal((x + made).full_tensor(), values() + 1)
    assert torch.equal((x[1:3] * view).full_tensor(), values()[1:3] * torch.arange(N, 3 * N).view(2, N))
    view[0, 0] = rank
    with pytest.raises(MixedTensorError, match="argument 'other' is a plain tensor"):
        x[1:3] * view
    with pytest.raises(MixedTensorError, match=r"run this inside `with dtensor.implicit_replication\(\):`"):
        x + torch.ones(N)


@with_threads(2)
def test_without_versions_a_tensor_is_good_until_its_region_ends(rank):
    mesh = init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        x = distribute_tensor(values(), mesh, [Shard(0)])
        with dtensor.implicit_replication():
            made = torch.ones(N)
            assert torch.equal((x + made).full_tensor(), values() + 1)
            made.copy_(torch.tensor(float(rank)).expand(N))
            made.add_(torch.ops.dtensor.shard(torch.ones(2 * N), 0, mesh.get_group(0).group_name))
            with pytest.raises(MixedTensorError):
                x + made
            made = torch.ones(N)
        with pytest.raises(MixedTensorError):
            x + made


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
@with_threads(2)
def test_what_torch_makes_itself_needs_no_region(rank):
    mesh = init_device_mesh("cpu", (2,))
    picture = torch.linspace(0, 1, 2 * 3 * 16).view(2, 3, 4, 4)
    for fn, x in (
        (lambda x: x[[0, 2]], values()),
        (lambda x: x[1:, [0, 3]], values()),
        (lambda x: torch.linalg.matrix_power(x, 3), values()),
        (lambda x: F.interpolate(x, size=(6, 6)), picture),
        (lambda x: F.interpolate(x, size=(6, 6), mode="bilinear"), picture),
        (lambda x: torch.combinations(x), torch.arange(4.0)),
        (lambda x: torch.linalg.matrix_rank(x), values()),
    ):
        found = fn(distribute_tensor(x, mesh, [Shard(0)]))
        torch.testing.assert_close(found.full_tensor(), fn(x))


@with_ranks(2)
def test_attention_with_a_plain_mask(rank):
    """On processes: which kernel is taken is a setting of the process."""
    mesh = init_device_mesh("cpu", (2,))
    q = torch.linspace(0, 1, 2 * 4 * N * 8).sin().view(2, 4, N, 8)
    x = distribute_tensor(q, mesh, [Shard(1)])
    for path in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        with dtensor.implicit_replication(), torch.nn.attention.sdpa_kernel(path):
            mask = torch.ones(N, N).tril() == 0
            found = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(N))

    def forward(self, x):
        return x + self.table


OUTSIDE = torch.ones(N)


def computed_locally(mesh):
    return dtensor.ones(2 * N, device_mesh=mesh, placements=[Shard(0)]).mul(2).to_local()


REFUSED = {
    "input": (lambda x, p, mesh: x + p * 2, "computed from an input of the compiled graph"),
    "part of an input": (lambda x, p, mesh: x + (torch.arange(N) + p), "computed from an input of the compiled graph"),
    "local": (lambda x, p, mesh: x + x.to_local()[0], "computed from an input of the compiled graph"),
    "closure": (lambda x, p, mesh: x + OUTSIDE, "computed from an input of the compiled graph"),
    "buffer": (WithBuffer(), "computed from an input of the compiled graph"),
    "random": (lambda x, p, mesh: x + torch.rand(N), r"of random numbers \(aten.rand.default\)"),
    "filled": (lambda x, p, mesh: x + torch.ones(N).normal_(), r"of random numbers \(aten.normal"),
    "coordinate": (lambda x, p, mesh: x + computed_locally(mesh), "that holds this rank's part of a DTensor"),
    "shard": (
        lambda x, p, mesh: x + torch.ops.dtensor.shard(torch.ones(2 * N), 0, mesh.get_group(0).group_name),
        "computed by dtensor.shard",
    ),
}


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_compiled_graph(mesh, name):
    fn, why = REFUSED[name]
    x = distribute_tensor(values(), mesh, [Shard(0)])
    given = (x,) if name == "buffer" else (x, torch.ones(N), mesh)
    text = rf"argument 'other' is a plain tensor of shape \[{N}\] {why}.*distribute_tensor\(x, device_mesh.*from_local"
    with pytest.raises(Exception, match=text) as raised:
        torch.compile(fn, backend="aot_eager", fullgraph=True)(*given)
    assert "x + " in str(raised.value), "the line of the user's code is shown"
    assert "implicit_replication" not in str(raised.value), "every graph is a region"


def test_symbolic_sizes(mesh):
    def fn(x):
        n = x.shape[0]
        return x.masked_fill(torch.ones(n, n).tril() == 0, -5.0) + torch.arange(n)

    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (4, 6, 10):
        x = torch.ones(n, n)
        found = compiled(distribute_tensor(x, mesh, [Shard(0)]))
        assert torch.equal(found.to_local(), fn(x)[: n // 2])
        assert isinstance(found, DTensor)


@with_ranks(2)
def test_what_functions_of_torch_make_themselves(rank):
    """What they draw is the same on all ranks, of batches too, whose operand is a view; what they are given is not."""
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2,))
    a = torch.linspace(-1, 1, 90, dtype=torch.float64).sin().view(2, 9, 5)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(a, mesh, [placement])
        for function in (torch.svd_lowrank, torch.pca_lowrank):
            _, s, _ = function(x, q=3, niter=8)
            wanted = torch.linalg.svdvals(a - a.mean(-2, keepdim=True) if function is torch.pca_lowrank else a)[..., :3]
            torch.testing.assert_close(s.full_tensor(), wanted)
        for function in (torch.masked.var, torch.masked.std):
            torch.testing.assert_close(function(x, 1, unbiased=True).full_tensor(), function(a, 1, unbiased=True))
            mask = distribute_tensor(a > -2, mesh, [placement])
            function(x, 1, unbiased=True, mask=mask)
            with pytest.raises(MixedTensorError, match="is a plain tensor"):
                function(x, 1, unbiased=True, mask=a > -2)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_what_functions_of_torch_draw(rank, inner):
    """Ranks that were seeded otherwise pool by the windows of the first, forward and backward."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 288).sin().view(1, 2, 9, 4, 4)
    for pool, given in ((F.fractional_max_pool2d, x.flatten(3)), (F.fractional_max_pool3d, x)):
        size = (4, *[2] * (given.dim() - 3))
        run = lambda x, pool=pool, size=size: pool(x, 2, output_size=size)  # noqa: E731
        run = run if inner == "eager" else torch.compile(run, backend="dtensor", options={"inner": inner})
        found = []
        for placement in (Shard(1), Shard(2), Replicate()):
            torch.manual_seed(rank)
            ours = distribute_tensor(given, mesh, [placement]).requires_grad_()
            out = run(ours)
            out.sum().backward()
            found.append(torch.cat([out.full_tensor().detach().flatten(), ours.grad.full_tensor().flatten()]))
            first = found[-1].clone()
            dist.broadcast(first, 0)
            assert torch.equal(found[-1], first)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@with_ranks(3)
def test_what_functions_of_torch_make_where_a_rank_is_outside_the_mesh(rank):
    x = distribute_tensor(torch.linspace(-1, 1, 30).sin().view(6, 5), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    _, s, _ = torch.svd_lowrank(x, q=3)
    assert s.to_local().shape == ((3,) if rank < 2 else (0,))
