"""Batches of any size, in any order: one device's values and gradients, in as many graphs as torch.compile makes there.

Sizes that the mesh divides, that it does not, and that are smaller than the mesh. A rank that compiled anew where
another did not would hang.
"""

import functools
import itertools

import pytest
import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.layout.chunks import chunk_length
from dtensor.mesh.local_sizes import _lengths, local_length, local_lengths
from dtensor.testing import fake_ranks, with_ranks
from dtensor.torch_private.compiling import sizes_defined_by
from dtensor.torch_private.symbolic_sizes import number_if_known, stand_in, symbolic_mode

PROGRAMS = {
    "mlp": lambda x, w, b: (x + F.gelu(F.linear(x, w, b)) @ w).logsumexp(-1).mean(),
    "cross entropy": lambda x, w, b: F.cross_entropy(F.linear(x, w, b), torch.argmax(x.detach(), 1)),
    "attention": lambda x, w, b: _attention(x, w),
    "sizes in arithmetic": lambda x, w, b: (x / x.shape[0]).sum() * x.shape[0] + (x @ x.t()).pow(2).mean(),
    "a statistic": lambda x, w, b: torch.var_mean(x, 0)[1].pow(2).sum() + x.amax(0).sum(),
    "in place": lambda x, w, b: (x * 1).mul_(2).index_fill(1, torch.tensor([0]), 1.0).pow(2).mean(),
}
MORE = {
    "layer norm": lambda x, w, b: F.layer_norm(x @ w, (4,), b, b).pow(2).mean(),
    "attention, a head for each row": lambda x, w, b: F.scaled_dot_product_attention(
        *[(x @ w)[None, :, None]] * 3
    ).sum(),
    "attention in three dimensions": lambda x, w, b: F.scaled_dot_product_attention(*[(x @ w).unsqueeze(1)] * 3).sum(),
    "pad and cat": lambda x, w, b: torch.cat([F.pad(x[:, 1:], (1, 0)), x], 1).narrow(1, 0, 4).pow(2).mean(),
    "another layout and back": lambda x, w, b: _there_and_back(x) @ w.sum(1) @ torch.ones_like(x[:, 0]),
    "a cumulative sum along the batch": lambda x, w, b: x.cumsum(0).pow(2).mean(),
    "cat of batches": lambda x, w, b: (torch.cat([x, x * 2], 0) @ w).pow(2).mean(),
    "rows": lambda x, w, b: x[0].sum() + x[-1].pow(2).sum(),
    "softmax along the batch": lambda x, w, b: (x.softmax(0) * x).sum(),
    "sort": lambda x, w, b: x.sort(0).values[0].sum(),
    "outer": lambda x, w, b: (x.unsqueeze(1) * x.unsqueeze(0)).pow(2).mean(),
    "expand": lambda x, w, b: (x.unsqueeze(1).expand(x.shape[0], 3, 4) * b).mean(),
    "einsum": lambda x, w, b: torch.einsum("bi,ij,bj->b", x, w, x).sum(),
    "factories": lambda x, w, b: (torch.zeros_like(x) + x.new_ones(x.shape) * x).mean(),
    "gated": lambda x, w, b: _gated(x, w),
    "convolution": lambda x, w, b: F.conv1d(x.unsqueeze(1), w[:, :3].unsqueeze(1), b, padding=1).pow(2).mean(),
    "embedding": lambda x, w, b: (F.embedding(torch.argmax(x.detach(), 1), w) * x).mean(),
    "gather": lambda x, w, b: x.gather(1, x.detach().argsort(1)).pow(2).sum(0).norm(),
    "flip and roll": lambda x, w, b: (x.flip(0) * x.roll(1, 0)).mean(),
    "stack": lambda x, w, b: torch.stack([x, x * 2], 1).mean(1).pow(2).sum(),
    "all but one row": lambda x, w, b: (x[1:] * x[:-1]).sum(),
    "whole": lambda x, w, b: (x.full_tensor() if isinstance(x, DTensor) else x).pow(2).mean(),
}
WITH_ROWS = {
    "pooled": lambda x, w, b: F.max_pool1d(x @ w, 2).pow(2).sum(),
    "rotated": lambda x, w, b: torch.fft.fft(x @ w).abs().sum(),
}
"""In these are kernels that refuse tensors without elements."""
REGROUPED = {
    "flattened": lambda x, w, b: (x @ w).flatten().tanh().norm(),
    "in microbatches": lambda x, w, b: (x @ w).view(x.shape[0] * 2, 2).pow(2).sum(0).sum(),
}
"""Views that keep a shard only where the mesh divides the batch: such sizes and all others have a graph each."""
NUMBERS = {
    "taken along": lambda x, w, b: _taken(x @ w, torch.argmax(w.detach(), 1, True)),
    "softmax of columns": lambda x, w, b: ((x @ w).log_softmax(0) * w).sum() + (x @ w).logsumexp(0).tanh().sum(),
    "rows added": lambda x, w, b: ((x @ w).tanh() + w).cumsum(1).pow(2).mean(),
}
"""In these a trace learns that there are four rows, in the middle or because a rank has none."""
EVERY = {**PROGRAMS, **MORE, **REGROUPED, **WITH_ROWS}


def _attention(x, w):
    q = (x @ w).view(1, x.shape[0], 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).pow(2).mean()


def _there_and_back(x):
    if not isinstance(x, DTensor):
        return x * 2
    return (x.redistribute(placements=[Shard(1)] * x.device_mesh.ndim) * 2).redistribute(placements=x.placements)


def _taken(y, index):
    return (y.tanh() * torch.take_along_dim(y, index, 1)).cumsum(0).sum()


def _gated(x, w):
    a, b = (x @ w).chunk(2, -1)
    return (F.silu(a) * b).sum(0).pow(2).sum()


def batches(sizes):
    made = torch.Generator().manual_seed(0)
    w, b = torch.randn(4, 4, generator=made).double(), torch.randn(4, generator=made).double()
    return [(torch.randn(n, 4, generator=made).double(), w, b) for n in sizes]


def compiled(fn, backend, dynamic, **options):
    torch.compiler.reset()
    counters.clear()
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic, **options)


def differentiated(fn, given):
    out = fn(*given)
    return out, *torch.autograd.grad(out, given, allow_unused=True)


def graphs_of_torch(fn, sizes, dynamic):
    plain = compiled(fn, "aot_eager", dynamic)
    for given in batches(sizes):
        differentiated(plain, [t.requires_grad_() for t in given])
    return counters["stats"]["unique_graphs"]


def check(name, mesh, placements, sizes, *, dynamic=None, inner="aot_eager", more=0):
    fn = {**EVERY, **NUMBERS}[name]
    wanted = [graphs_of_torch(fn, sizes, dynamic) + more if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(wanted)
    ours = compiled(fn, "dtensor", dynamic, options={"inner": inner})
    whole = [Replicate()] * mesh.ndim
    for n, given in zip(sizes, batches(sizes)):
        placed = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(given, (placements, whole, whole))]
        found = differentiated(ours, placed)
        for a, b in zip(found, differentiated(fn, [t.requires_grad_() for t in given])):
            if a is None or b is None:
                assert a is b, f"{name}: a gradient is missing"
                continue
            a = a.full_tensor() if isinstance(a, DTensor) else a
            torch.testing.assert_close(a, b, msg=f"{name}, {n} rows of {sizes}: {a} is not {b}")
    assert counters["stats"]["unique_graphs"] <= wanted[0], (
        f"{name}: {counters['stats']['unique_graphs']}, not {wanted}"
    )


@with_ranks(2)
def test_last_batch(rank):
    """What every epoch ends with, and nothing is asked of torch.compile; at night all programs, and more sizes."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ("cross entropy", "attention"):
        check(name, mesh, [Shard(0)], (4, 5, 8, 3))


@pytest.mark.parametrize(
    "name",
    [
        "attention, a head for each row",
        pytest.param("attention in three dimensions", marks=pytest.mark.nightly),
        pytest.param("another layout and back", marks=pytest.mark.nightly),
        pytest.param("pad and cat", marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_dynamic_from_the_start(rank, name):
    check(name, init_device_mesh("cpu", (2,)), [Shard(0)], (6, 9, 3), dynamic=True)


@pytest.mark.parametrize("name", ["flattened", pytest.param("in microbatches", marks=pytest.mark.nightly)])
@with_ranks(2)
def test_views_that_regroup_the_batch(rank, name):
    check(name, init_device_mesh("cpu", (2,)), [Shard(0)], (4, 6, 8, 5, 7), more=1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["layer norm", "mlp"])
@with_ranks(4)
def test_two_axes_cut_the_batch(rank, name):
    check(name, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)], (8, 6, 9, 4))


@pytest.mark.parametrize("name", ["rotated", pytest.param("pooled", marks=pytest.mark.nightly)])
@with_ranks(4)
def test_ranks_without_rows_where_a_kernel_refuses_that(rank, name):
    """Of 3 and 2 rows some rank has none: such a size has a graph of its own, on all ranks."""
    check(name, init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(0)], (4, 3, 6, 2), more=2)


@pytest.mark.parametrize(
    "name", ["softmax of columns", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("rows added", "taken along"))]
)
@with_ranks(3)
def test_sizes_that_become_numbers(rank, name):
    """On three ranks the shards of the rows are then 2, 2 and 0."""
    check(name, init_device_mesh("cpu", (3,)), [Shard(0)], (4, 4), dynamic=True)


@pytest.mark.nightly
@with_ranks(2)
def test_a_size_that_only_the_backward_makes_a_number(rank):
    """The backward of a cumulative product is a loop over its length: each length has a graph, as in plain torch."""

    def fn(x):
        return (x.cumprod(0) * x).sin()

    mesh = init_device_mesh("cpu", (2,))
    ours = compiled(fn, "dtensor", True, options={"inner": "aot_eager"})
    for n in (3, 4):
        x = (torch.rand(n, 3) + 0.5).requires_grad_()
        placed = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        out, expected = ours(placed), fn(x)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(placed.grad.full_tensor(), x.grad)


@with_ranks(2)
def test_two_inputs_of_one_length(rank):
    """What a trace assumes of the part of the one is not asserted of the part of the other."""
    ours = compiled(lambda x, y: F.cosine_similarity(x, y, dim=0), "dtensor", None, options={"inner": "aot_eager"})
    for n in (6, 7, 3):
        x, y = torch.rand(n, 4), torch.rand(n, 4)
        placed = [distribute_tensor(t, init_device_mesh("cpu", (2,)), [Shard(0)]) for t in (x, y)]
        torch.testing.assert_close(ours(*placed).full_tensor(), F.cosine_similarity(x, y, dim=0))
    assert counters["stats"]["unique_graphs"] == 2


def test_what_the_length_of_an_input_is_a_part_of_is_not_computed(monkeypatch):
    """The backward of a loss was given labels that are cut over two axes, and not the length of the whole batch."""
    monkeypatch.setattr(PythonWrapperCodegen, "codegen_inputs", PythonWrapperCodegen.codegen_inputs)
    part, whole = sympy.symbols("part whole")

    def lengths(env):
        (own,) = [s for s in env.backed_var_to_val if str(s).startswith("s")]
        return {part: (whole, "dp", False), own: (part, "tp", False)}

    sizes_defined_by(torch.ops.dtensor.local_length.default, lengths)
    with inductor_config.patch(force_disable_caches=True):
        x = torch.rand(5)
        torch.testing.assert_close(compiled(torch.sin, "inductor", True)(x), x.sin())


@pytest.mark.parametrize("equal", [True, False])
def test_a_backward_that_gets_a_flattened_tensor_knows_the_factors_of_its_length(fake_mesh, equal):
    """They are in the shapes of local tensors only; Inductor refused the graph. `equal`: sizes of one value may be."""
    mesh = fake_mesh(2, 2)
    ours = compiled(lambda x, y: F.cross_entropy(x, y.flatten()), "dtensor", True)
    with torch.fx.experimental._config.patch(use_duck_shape=equal):
        for n in (8, 12):
            x = DTensor.from_local(torch.randn(n * 3 // 4, 5), mesh, [Shard(0), Shard(0)]).requires_grad_()
            y = DTensor.from_local(torch.randint(5, (n // 4, 3)), mesh, [Shard(0), Shard(0)])
            ours(x, y).backward()
            assert x.grad is not None
            assert x.grad.shape == (3 * n, 5)


def test_the_place_of_a_part_in_memory_is_no_size(fake_mesh):
    """Parts of a larger batch start where their rank's begins, which was taken for a size that had the same value."""
    mesh = fake_mesh(2)
    ours = compiled(lambda x, y: x.sin() * y.sum(), "dtensor", True, options={"inner": "aot_eager"})
    for n in (4, 6, 10):
        part = torch.rand(n, 5).tensor_split(2)[1]
        x = DTensor.from_local(part, mesh, [Shard(0)])
        torch.testing.assert_close(ours(x, torch.ones(10)).to_local(), part.sin() * 10)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.nightly
@with_ranks(2)
def test_under_inductor(rank):
    check("layer norm", init_device_mesh("cpu", (2,)), [Shard(0)], (4, 5, 8, 3), inner="inductor")


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dim", [0, 1])
@with_ranks(2)
def test_every_program(rank, dim, dynamic):
    mesh = init_device_mesh("cpu", (2,))
    for name in EVERY:
        for sizes in ((4, 5, 8, 3, 6, 7, 9), (3, 9, 6, 5, 4)):
            check(name, mesh, [Shard(dim)], sizes, dynamic=dynamic, more=len(sizes) * (name in REGROUPED))


@with_ranks(2)
def test_a_part_as_long_as_that_of_an_input_met_later(rank):
    """Dynamo asks for the length of `moved` when it meets the weight, and wrote that in front of `moved`."""
    mesh = init_device_mesh("cpu", (2,))
    x, y, weight = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4, 1)
    placed = [distribute_tensor(t, mesh, [p]) for t, p in ((x, Shard(0)), (y, Replicate()), (weight, Shard(0)))]

    def fn(x, y, weight):
        moved = x.redistribute(placements=[Shard(1)])
        return moved, F.conv1d(y, weight)

    moved, out = compiled(fn, "dtensor", True, options={"inner": "aot_eager"})(*placed)
    torch.testing.assert_close(moved.full_tensor(), x)
    torch.testing.assert_close(out.full_tensor(), F.conv1d(y, weight))


@with_ranks(2)
def test_a_size_that_is_added_to_and_taken_from(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(4, 7)
    last = compiled(lambda x: x[:, 6:] * 1, "dtensor", True, options={"inner": "aot_eager"})
    given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    found = last(given)
    torch.testing.assert_close(found.full_tensor(), x[:, 6:])
    found.sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), (torch.arange(7) == 6).float().expand(4, 7))


def traced_length(n):
    """A symbolic size that is `n` where it is traced."""
    return stand_in(symbolic_mode(), torch.empty(n), "x", True).shape[0]


def test_a_local_length_is_a_symbol_that_all_ranks_take_alike(fake_mesh):
    group = fake_mesh(4).get_group().group_name
    s = traced_length(10)
    mine = local_length(s, group)
    assert local_length(s, group).node.expr == mine.node.expr, "one symbol for one length"
    assert mine.node.hint == 3, "what the first rank has, on every rank"
    assert local_length(s * 4, group).node.expr == s.node.expr, "what is known to divide needs no symbol"
    assert [first for _, _, first in local_lengths(s.node.shape_env).values()] == [False]


def test_what_is_asked_of_a_local_length_is_asked_of_every_rank(fake_mesh):
    """Ten rows on four ranks are 3, 3, 3 and 1."""
    group = fake_mesh(4).get_group().group_name
    s = traced_length(10)
    mine = local_length(s, group).node.expr
    lengths = _lengths(s.node.shape_env)

    def holds(condition, size):
        return bool(lengths.on_all_ranks(condition).xreplace({s.node.expr: sympy.Integer(size)}))

    assert holds(mine <= 3, 10)
    assert not holds(mine >= 2, 10), "the last rank has one row"
    assert holds(mine >= 2, 8)
    assert not holds(sympy.Ne(mine, 1), 5), "2, 2, 1 and 0"


def test_code_in_a_cache_keeps_what_is_asked_of_local_lengths(fake_mesh):
    """It is called with whole lengths. A rank that took such code from the cache did not compile when others did."""
    group = fake_mesh(2).get_group().group_name
    s = traced_length(8)
    assert local_length(s, group) >= 4  # a guard
    (kept,) = s.node.shape_env.get_pruned_guards([s])
    assert [bool(kept.expr.xreplace({s.node.expr: sympy.Integer(n)})) for n in (7, 8, 9)] == [False, True, True]


def test_a_part_of_a_part_is_asked_of_every_rank(fake_mesh):
    """Of 29 rows the four ranks have 8, 8, 8 and 5; of as many as it has each takes its part: 2, 2, 2 and none."""
    group = fake_mesh(4).get_group().group_name
    s = traced_length(29)
    mine = local_length(local_length(s, group), group).node.expr
    lengths = _lengths(s.node.shape_env)
    for condition, size, expected in ((mine >= 2, 29, False), (mine <= 2, 29, True), (mine >= 2, 32, True)):
        assert bool(lengths.on_all_ranks(condition).xreplace({s.node.expr: sympy.Integer(size)})) is expected


def test_lengths_that_two_groups_cut_in_either_order_are_asked_of_every_rank(fake_mesh):
    """What the last rank with rows is in one group depends on the place in the other."""
    rows, columns = [group.group_name for group in fake_mesh(2, 2).get_all_groups()]
    s = traced_length(9)
    orders = (rows, columns), (columns, rows)
    parts = [functools.reduce(local_length, order, s * 3).node.expr for order in orders]
    whole = functools.reduce(local_length, orders[0], s).node.expr
    lengths = _lengths(s.node.shape_env)

    def part(n, places):
        return functools.reduce(lambda n, place: chunk_length(n, 2, place), places, n)

    for condition in (sympy.Eq(parts[0], parts[1]), parts[0] >= whole + 2, parts[1] <= 2 * whole + 1):
        asked = lengths.on_all_ranks(condition)
        assert asked.free_symbols == {s.node.expr}
        for n in range(1, 30):
            holds = True
            for i, j in itertools.product(range(2), repeat=2):
                found = {parts[0]: part(3 * n, (i, j)), parts[1]: part(3 * n, (j, i)), whole: part(n, (i, j))}
                holds &= bool(condition.xreplace({x: sympy.Integer(length) for x, length in found.items()}))
            assert bool(asked.xreplace({s.node.expr: sympy.Integer(n)})) is holds, (condition, n)


def test_what_a_trace_learns_to_divide_settles_the_length_of_a_part(fake_mesh):
    group = fake_mesh(2).get_group().group_name
    s = traced_length(6)
    mine = local_length(s, group)
    assert s % 2 == 0  # a guard
    local_length(s, group)
    assert mine.node.expr == (s // 2).node.expr


def test_parts_of_lengths_that_turn_out_equal_are_one(fake_mesh):
    """And parts of these parts: values that a trace made before say the same as those that it makes after."""
    groups = fake_mesh(2, 2).get_all_groups()
    first, last = [group.group_name for group in groups]
    with torch.fx.experimental._config.patch(use_duck_shape=False):
        mode = symbolic_mode()
        a, b = (stand_in(mode, torch.empty(9), name, True).shape[0] for name in "xy")
    assert a.node.expr != b.node.expr
    parts = [local_length(n, first) for n in (a, b)]
    parts += [local_length(part, last) for part in parts]
    assert a == b  # a guard
    assert parts[0].node.expr == parts[1].node.expr != a.node.expr
    assert parts[2].node.expr == parts[3].node.expr != parts[0].node.expr


@pytest.mark.parametrize(("rank", "wanted"), [(0, [3, 3, 2, 2]), (1, [3, 3, 1, 1]), (3, [2, 2, 1, 1])])
def test_parts_of_equal_lengths_that_turn_out_a_number(rank, wanted):
    """Of which another rank has another part, so that it is not what the trace took it for."""
    with fake_ranks(4, rank), torch.fx.experimental._config.patch(use_duck_shape=False):
        first, last = [group.group_name for group in init_device_mesh("cpu", (2, 2)).get_all_groups()]
        mode = symbolic_mode()
        a, b = (stand_in(mode, torch.empty(5), name, True).shape[0] for name in "xy")
        parts = [local_length(n, first) for n in (a, b)]
        parts += [local_length(part, last) for part in parts]
        assert a == b  # a guard, as the next
        assert a == 5
        assert [number_if_known(part) for part in parts] == wanted


def test_what_a_trace_learns_to_divide_in_the_middle(fake_mesh):
    """The backward learns that an axis divides the length, and where it does, nothing of the graph computes that."""
    mesh = fake_mesh(2, 2)
    ours = compiled(lambda x: x.logcumsumexp(1), "dtensor", True, options={"inner": "aot_eager"})
    x = DTensor.from_local(torch.rand(6, 4, 8), mesh, [Shard(1), Partial()]).requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 8, 8)


@with_ranks(2)
def test_a_length_that_a_tangent_tells_is_that_of_an_input(rank):
    """Torch looks a length up where it came last, in the gradient that flows back, once two lengths are equal."""
    mesh = init_device_mesh("cpu", (2,))
    ours = compiled(lambda x: x.flatten(0, 1).sin(), "dtensor", True, options={"inner": "aot_eager"})
    for n in (3, 2, 5):
        given = torch.linspace(-1, 1, 2 * n).view(n, 2)
        x = distribute_tensor(given, mesh, [Shard(0)]).requires_grad_()
        y = ours(x)
        torch.testing.assert_close(y.full_tensor(), given.flatten().sin())
        y.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), (2 * given).sin())


def test_passes_do_not_take_sizes_for_equal_whose_examples_are(fake_mesh):
    """Two rows are one on each rank: where a gather was lowered, torch took 2 for the rows of all ranks."""
    mesh = fake_mesh(2, 2)
    ours = compiled(lambda x: x.flatten(0, 1).sin(), "dtensor", True, options={"inner": "aot_eager"})
    for n in (3, 2, 5, 4):
        x = distribute_tensor(torch.rand(n, 2), mesh, [Shard(1), Shard(0)]).requires_grad_()
        ours(x).sum().backward()
        assert x.grad is not None


def test_a_guard_may_be_simplified_with_a_local_length_in_it(fake_mesh):
    """A gradient is summed to the size before it was expanded; torch looks up the bounds of what that compares."""
    mesh = fake_mesh(2, 2)

    def fn(x, y, z):
        return torch.where(x > 0.1, x, y), torch.where(y > 0.1, y, z)

    ours = compiled(fn, "dtensor", True, options={"inner": "aot_eager"})
    for n in (9, 1):
        x = DTensor.from_local(torch.rand(n, 5), mesh, [Partial(), Shard(1)], shape=(n, 9), stride=(9, 1))
        y = distribute_tensor(torch.rand(n, 1), mesh, [Shard(1), Shard(0)]).requires_grad_()
        z = DTensor.from_local(torch.rand(1), mesh, [Partial(), Partial()]).requires_grad_()
        first, second = ours(x, y, z)
        (first.sum() + second.sum()).backward()
        assert y.grad is not None
        assert y.grad.shape == (n, 1)


@pytest.mark.parametrize("before", [False, True], ids=["cut after", "cut before"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_length_that_is_known_to_be_one(rank, before):
    """The channels of the input are half of a symbolic length, those of the weight one: the second rank has none."""
    with fake_ranks(2, rank):
        mesh = init_device_mesh("cpu", (2,))

        def fn(x, w, b):
            y = F.avg_pool1d(x, 2)
            if before:
                y = y.redistribute(placements=[Shard(1)]) * 2
            return F.batch_norm(y, None, None, w, b, training=True) + y

        ours = compiled(fn, "dtensor", True, options={"inner": "aot_eager", "agreement": False})
        x = distribute_tensor(torch.rand(6, 2), mesh, [Shard(0)])
        assert ours(x, *[distribute_tensor(torch.rand(1), mesh, [Shard(0)]) for _ in range(2)]).shape == (6, 1)
    torch.compiler.reset()


def test_a_kernel_that_ends_the_process_is_not_asked_for_nothing(fake_mesh):
    """Torch's backward of a batch norm divides by the number of channels, which every rank has to have: a guard."""
    mesh = fake_mesh(2)

    def fn(x, w, b):
        return F.batch_norm(x, None, None, w, b, training=True)

    ours = compiled(fn, "dtensor", True, options={"inner": "aot_eager"})
    x = distribute_tensor(torch.rand(3, 4, 5), mesh, [Shard(1)]).requires_grad_()
    w, b = (distribute_tensor(torch.rand(4), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
    ours(x, w, b).sum().backward()
    assert x.grad.shape == x.shape


def test_a_rank_may_have_rows_and_no_columns():
    """The kernel of the loss takes no samples of no classes, and refuses samples of no classes."""
    with fake_ranks(6, 5):
        mesh = init_device_mesh("cpu", (2, 3))
        ours = compiled(F.nll_loss, "dtensor", True, options={"inner": "aot_eager", "agreement": False})
        for classes in (6, 4):
            x = distribute_tensor(torch.rand(8, classes), mesh, [Shard(0), Shard(1)])
            target = distribute_tensor(torch.arange(8) % classes, mesh, [Shard(0), Replicate()])
            assert ours(x, target).shape == ()
        assert counters["stats"]["unique_graphs"] == 2
    torch.compiler.reset()
