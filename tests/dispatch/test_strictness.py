"""Strict mode: what is refused and how it is said, what stays allowed, and that doing what the message says helps."""

import doctest
import itertools
import threading
import warnings
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtensor
from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StrictError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.layout.layout import Layout
from dtensor.testing import CountCollectives, with_threads

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(4)


def placed(x, mesh, placements):
    """`x` on the mesh; as equal parts where it is partial."""
    cut = distribute_tensor(x, mesh, [Replicate() if p.is_partial() else p for p in placements])
    parts = [mesh.size(axis) for axis, p in enumerate(placements) if p.is_partial()]
    if not parts:
        return cut
    return DTensor.from_local(cut.to_local() / prod(parts), mesh, placements, shape=x.shape, stride=x.stride())


def make(mesh, shape, *placements, grad=False):
    return placed(torch.rand(shape), mesh, placements).requires_grad_(grad)


def refusal(call) -> str:
    with dtensor.strict(), pytest.raises(StrictError) as caught:
        call()
    return str(caught.value)


def test_an_implicit_collective_is_refused_with_the_call_to_write(mesh):
    x, w = make(mesh, (8, 16), S0), make(mesh, (16, 32), S1)
    assert refusal(lambda: x @ w) == (
        "aten.mm.default would redistribute 'self' from [Shard(0)] to [Replicate()] (all_gather over axis 0; 384 bytes)"
        ", which dtensor.strict() does not allow; write self.redistribute(placements=[Replicate()]) first"
    )
    with dtensor.strict(), CountCollectives() as seen:
        assert (x + 1).placements == (S0,)
        assert not seen.collectives
        assert (x.redistribute(placements=[Replicate()]) @ w).placements == (S1,)
        assert [c.op for c in seen.collectives] == ["all_gather"]
    assert (x @ w).placements == (S1,)


def test_the_cached_decision_is_checked_too(mesh):
    x, w = make(mesh, (8, 16), S0), make(mesh, (16, 32), S1)
    assert (x @ w).placements == (S1,)
    assert refusal(lambda: x @ w) == refusal(lambda: x @ w)
    assert (x @ w).placements == (S1,)


def test_a_view_names_the_dimension_that_has_to_move(mesh):
    assert refusal(lambda: make(mesh, (2, 4, 8), S1).view(8, 8)) == (
        "aten.view.default would redistribute 'self' from [Shard(1)] to [Shard(2)] (all_to_all over axis 0; 48 bytes): "
        "dimension 1 (of length 4) has to leave mesh axis 0 for the view [2, 4, 8] -> [8, 8], which dtensor.strict() "
        "does not allow; write self.redistribute(placements=[Shard(2)]) first"
    )


def test_what_is_moved_back_counts_too(mesh):
    """To be changed in place by an operator that is not linear, a partial tensor is reduced and made partial again."""
    assert refusal(lambda: make(mesh, (8, 8), P).relu_()) == (
        "aten.relu_.default would redistribute 'self' from [Partial()] to [Replicate()] and back (all_reduce over axis "
        "0, then partial over axis 0; 384 bytes), which dtensor.strict() does not allow; "
        "write self.redistribute(placements=[Replicate()]) first"
    )
    with dtensor.strict():
        assert make(mesh, (8, 8), P).redistribute(placements=[R]).relu_().placements == (R,)


def test_lists_name_the_item(mesh):
    text = refusal(lambda: torch.cat([make(mesh, (8, 16), S0), make(mesh, (8, 16), S1)]))
    assert "'tensors[0]' from [Shard(0)] to [Shard(1)]" in text
    assert text.endswith("write tensors[0].redistribute(placements=[Shard(1)]) first")
    text = refusal(lambda: torch._foreach_add([make(mesh, (8,), S0)] * 2, [make(mesh, (8,), P), make(mesh, (8,), S0)]))
    assert text.startswith("aten._foreach_add.List would redistribute 'other' from [Partial()] to [Shard(0)]")


def test_an_axis_with_a_name_is_named(fake_mesh):
    mesh = fake_mesh(2, 2, names=("dp", "tp"))
    text = refusal(lambda: make(mesh, (8, 8), S0, S1).relu() + make(mesh, (8, 8), S0, P))
    assert "(reduce_scatter over axis 1 (tp); 64 bytes)" in text
    assert text.endswith("write other.redistribute(placements=[Shard(0), Shard(1)]) first")


def test_an_axis_of_one_rank_sends_nothing(fake_mesh):
    mesh = fake_mesh(1)
    with dtensor.strict():
        assert (make(mesh, (8, 16), S0) @ make(mesh, (16, 32), S1)).to_local().shape == (8, 32)


def test_an_operator_without_a_rule(mesh):
    x = make(mesh, (8,), S0)
    before = dtensor.fallbacks()
    assert refusal(lambda: torch.histogram(x, 3)) == (
        "aten.histogram.bin_ct has no sharding rule: its arguments (self: [Shard(0)]) would be gathered and it would "
        "run on every rank, which dtensor.strict() does not allow; write self.redistribute(placements=[Replicate()]) "
        "first, or give it a rule with dtensor.register_sharding"
    )
    assert not dtensor.fallbacks() - before
    with warnings.catch_warnings(), dtensor.strict():
        warnings.simplefilter("ignore")
        assert torch.histogram(x.redistribute(placements=[R]), 3)[0].placements == (R,)
    assert not dtensor.fallbacks() - before


def test_fallbacks_are_counted_on_every_call(mesh):
    x = make(mesh, (8,), S0)
    before = dtensor.fallbacks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            torch.histogram(x, 4)
    # These need whole values by their meaning.
    x.unique_consecutive()
    x.nonzero()
    found = dtensor.fallbacks() - before
    assert found == {"aten.histogram.bin_ct": 3}
    taken = dtensor.fallbacks(reset=True)
    assert taken["aten.histogram.bin_ct"] >= 3
    taken.clear()
    assert not dtensor.fallbacks()


def test_the_docstrings_run(fake_mesh):
    mesh = fake_mesh(2)
    names = {"x": make(mesh, (8, 16), S0), "w": make(mesh, (16, 32), S1), **vars(dtensor), "torch": torch}
    for function in (dtensor.strict, dtensor.fallbacks):
        (test,) = doctest.DocTestFinder().find(function, globs={**names, "dtensor": dtensor})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = doctest.DocTestRunner().run(test)
        assert (found.failed, found.attempted) == (0, 3)


def test_operators_that_run_as_others_name_what_was_called(mesh):
    x = make(mesh, (8, 16), S1)
    text = refusal(lambda: torch.linalg.vector_norm(x))
    assert text.startswith("aten.linalg_vector_norm.default runs as other operators, of which aten.sqrt.default would")
    assert text.endswith("write self.redistribute(placements=[Replicate()]) first")
    text = refusal(lambda: F.rms_norm(x, (16,)))
    assert text.startswith("rms_norm runs as other operators, of which aten.add.Tensor would redistribute 'self'")
    assert text.endswith("write input.redistribute(placements=[Replicate()]) first")
    assert refusal(lambda: torch._foreach_norm([x])).startswith("aten._foreach_norm.Scalar runs as other operators")


def test_attention_on_the_math_path(mesh):
    q, k = make(mesh, (4, 2, 8, 16), S0), make(mesh, (4, 2, 8, 16), Shard(2))
    mask = make(mesh, (8, 8), S0)
    with sdpa_kernel(SDPBackend.MATH):
        text = refusal(lambda: F.scaled_dot_product_attention(q, k, q, mask))
        assert text.startswith("scaled_dot_product_attention would redistribute 'key' from [Shard(2)] to [Shard(0)]")
        assert "and 'attn_mask' from [Shard(0)] to [Replicate()]" in text
        with dtensor.strict():
            assert F.scaled_dot_product_attention(q, q, q).placements == (S0,)


def test_values_that_are_needed_whole(mesh):
    assert "'self' from [Partial()] to [Replicate()]" in refusal(lambda: make(mesh, (), P).item())
    assert "aten.nonzero.default would redistribute" in refusal(lambda: make(mesh, (8,), S0).nonzero())
    with dtensor.strict():
        assert make(mesh, (), P).redistribute(placements=[R]).item() >= 0


def test_what_is_asked_for_is_allowed(mesh):
    with dtensor.strict():
        x, w = make(mesh, (8, 16), S0, grad=True), make(mesh, (16, 4), R, grad=True)
        out = x.redistribute(placements=[R]) @ w.redistribute(placements=[S1])
        out.redistribute(placements=[S0]).sum().redistribute(placements=[R]).backward()
        assert x.grad.placements == (S0,)
        assert w.grad.placements == (R,)
        assert x.full_tensor().shape == (8, 16)
        table = make(mesh, (16, 8), S1, grad=True)
        F.embedding(distribute_tensor(torch.arange(8), mesh, [R]), table).sum().backward()
        assert table.grad.placements == (S1,)


def test_backward_is_checked(mesh):
    x, y = make(mesh, (8, 8), S0, grad=True), make(mesh, (8, 8), S0)
    out = (x * y).sum(0).redistribute(placements=[S0])
    grad = make(mesh, (8,), R)
    with dtensor.strict():
        out.backward(grad)
    loss = make(mesh, (8, 8), S0, grad=True).relu()
    assert "threshold_backward.default would redistribute 'grad_output'" in refusal(
        lambda: loss.backward(DTensor.from_local(torch.rand(8, 2), mesh, [S1]))
    )


def test_nesting_decorating_and_threads(mesh):
    x, w = make(mesh, (8, 16), S0), make(mesh, (16, 32), S1)
    with dtensor.strict():
        with dtensor.strict():
            pass
        with pytest.raises(StrictError):
            x @ w
        found = []
        thread = threading.Thread(target=lambda: found.append((x @ w).placements))
        thread.start()
        thread.join()
    assert found == [(S1,)]

    @dtensor.strict()
    def product():
        return x @ w

    for _ in range(2):
        with pytest.raises(StrictError):
            product()
    with pytest.raises(ZeroDivisionError), dtensor.strict():
        raise ZeroDivisionError
    assert (x @ w).placements == (S1,)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compilation_fails_and_succeeds_later(mesh, fullgraph):
    x, w = make(mesh, (8, 16), S0), make(mesh, (16, 32), S1)
    compiled = torch.compile(torch.matmul, backend="aot_eager", fullgraph=fullgraph)
    with dtensor.strict(), pytest.raises(Exception, match=r"write self.redistribute\(placements=\[Replicate\(\)\]\)"):
        compiled(x, w)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(torch.matmul, backend=counter, fullgraph=fullgraph)
    assert compiled(x, w).placements == (S1,)
    assert counter.frame_count == 1
    with dtensor.strict():
        assert compiled(x, w).placements == (S1,)


def test_an_implicit_collective_in_backward_fails_the_compilation(mesh):
    x, w = make(mesh, (8, 16), S0, grad=True), make(mesh, (16, 32), R, grad=True)

    def step(x, w):
        return (x @ w).relu().sum(0).redistribute(placements=[R]).relu()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with dtensor.strict():
        assert compiled(x, w).placements == (R,)

    def scaled(x, w):
        return torch.linalg.vector_norm(x @ w)

    with dtensor.strict(), pytest.raises(Exception, match=r"linalg_vector_norm.default runs as other operators"):
        torch.compile(scaled, backend="aot_eager", fullgraph=True)(x, w)


CALLS = {
    "mm": (torch.mm, (8, 8), (8, 8)),
    "add": (torch.add, (8, 8), (8,)),
    "addmm": (torch.addmm, (8,), (8, 8), (8, 8)),
    "relu": (torch.relu, (8, 8)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), (8, 8), (8,)),
    "softmax": (lambda x: x.softmax(0), (8, 8)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (8, 8), (8, 4)),
    "flatten": (lambda x: x.view(64), (8, 8)),
    "norm": (lambda x: torch.linalg.vector_norm(x), (8, 8)),
    "median": (lambda x: x.median(), (8, 8)),
    "cumsum": (lambda x: x.cumsum(1), (8, 8)),
}


@pytest.mark.parametrize("name", CALLS)
@with_threads(4)
def test_doing_what_the_message_says_helps(rank, name):
    """On two axes, for placements of all kinds: after a few redistributions the call runs in strict mode, rightly."""
    mesh = init_device_mesh("cpu", (2, 2))
    function, *shapes = CALLS[name]
    dense = [torch.linspace(-1, 2, torch.Size(s).numel()).reshape(s) for s in shapes]
    expected = function(*dense)
    states = [[R, P] + [Shard(d) for d in range(len(s))] for s in shapes]
    refused = 0
    every = list(itertools.product(*[itertools.product(s, s) for s in states]))
    for placements in every[:: 1 + len(every) // 30]:
        xs = [placed(x, mesh, p) for x, p in zip(dense, placements)]
        for _ in range(4):
            try:
                with dtensor.strict(), CountCollectives() as seen:
                    out = function(*xs)
                assert not seen.collectives
                break
            except StrictError as error:
                assert not seen.collectives
                refused += 1
                xs = [written(str(error), x, i) for i, x in enumerate(xs)]
        else:
            raise AssertionError(f"{placements}: four times the message was followed, to no avail")
        assert torch.allclose(out.full_tensor(), expected, atol=1e-5)
    assert refused


NAMES = (("self", "input", "tensors[0]", "mat1"), ("mat2", "other", "weight", "tensors[1]"))


def written(message, x, index):
    """`x` redistributed as `message` says for the operand at `index`."""
    fix = message.rpartition("; write ")[2]
    names = ("self", "mat1", "mat2") if "addmm" in message else [n[index] for n in zip(*NAMES)]
    for name in [names[index]] if "addmm" in message else names:
        _, found, rest = fix.partition(f"{name}.redistribute(placements=[")
        if found:
            return x.redistribute(placements=eval(f"[{rest.partition('])')[0]}]"))
    return x


def test_redistribute_that_only_changes_the_order_of_axes(fake_mesh):
    """Two axes on one dimension, cut in another order."""
    mesh = fake_mesh(2, 2)
    x = make(mesh, (8,), S0, S0)
    other = DTensor(torch.rand(2), mesh, Layout.parse("S(0)#1S(0)#0", 1), (8,), (1,))
    text = refusal(lambda: x + other)
    assert text.endswith("write other.redistribute(placements=[Shard(0), Shard(0)]) first")
    with dtensor.strict():
        assert (x + other.redistribute(placements=[S0, S0])).placements == (S0, S0)
