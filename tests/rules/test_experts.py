"""Layers of experts as one operator, against each token with its own matrices."""

import functools
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile import dump, statistics
from dtensor.parallel import expert_gate, experts
from dtensor.rules import grouped_rows
from dtensor.rules.expert_layers import GATES
from dtensor.testing import CountCollectives, run_ranks, run_threads
from dtensor.testing.rules.candidates import case as c
from tests.rules.checking import check

TOKENS, CHOSEN, EXPERTS, WIDTH, INNER = 7, 2, 3, 6, 4

ROUTINGS = {
    "even": lambda t, k, e: (torch.arange(t * k) % e).view(t, k),
    "to one": lambda t, k, e: torch.full((t, k), e - 1),
    "none to the last": lambda t, k, e: (torch.arange(t * k) % max(e - 1, 1)).view(t, k),
    "random": lambda t, k, e: torch.randint(0, e, (t, k), generator=torch.Generator().manual_seed(5)),
    "some to no expert": lambda t, k, e: (torch.arange(t * k) % (e + 2)).view(t, k) - 1,
}


def glu(h):
    return F.silu(h[:, ::2]) * (h[:, 1::2] + 1)


@cache
def gate():
    return expert_gate(glu, layer()[2])


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(t=TOKENS, k=CHOSEN, e=EXPERTS, biases=True):
    """What `experts` takes but for the indices."""
    shapes = [(t, WIDTH), (t, k), (e, WIDTH, 2 * INNER), (e, INNER, WIDTH)]
    shapes += [(e, 2 * INNER), (e, WIDTH)] if biases else []
    return [numbers(n, *shape) for n, shape in enumerate(shapes)]


def expected(index, x, weight, up, down, up_bias=None, down_bias=None):
    """Each token with the matrices of its experts, one by one."""
    rows = []
    for i, chosen in enumerate(index.tolist()):
        total = torch.zeros_like(down[0, 0])
        for j, e in enumerate(chosen):
            if 0 <= e < len(up):
                h = x[i : i + 1] @ up[e] + (0 if up_bias is None else up_bias[e])
                out = glu(h) @ down[e] + (0 if down_bias is None else down_bias[e])
                total = total + weight[i, j] * out[0]
        rows.append(total)
    return torch.stack(rows)


def layer_of(index):
    return lambda x, weight, *rest: experts(x, index, weight, *rest, gate=gate())


def both(compute, given, seed=9):
    """The result, and all gradients."""
    given = [x.detach().requires_grad_() for x in given]
    out = compute(*given)
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    found = torch.autograd.grad((whole * numbers(seed, *whole.shape)).sum(), given, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found)]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in (whole, *found)]


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_are_each_token_with_its_own_matrices(routing, biases):
    given, index = layer(biases=biases), ROUTINGS[routing](TOKENS, CHOSEN, EXPERTS)
    torch.testing.assert_close(both(layer_of(index), given), both(functools.partial(expected, index), given))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_indices_of_any_integers(dtype):
    given, index = layer(), ROUTINGS["random"](TOKENS, CHOSEN, EXPERTS)
    torch.testing.assert_close(both(layer_of(index.to(dtype)), given), both(layer_of(index), given))


def test_experts_may_be_differentiated_twice():
    given = [x.requires_grad_() for x in layer(4)]
    index = ROUTINGS["some to no expert"](4, CHOSEN, EXPERTS)
    assert torch.autograd.gradgradcheck(layer_of(index), given, fast_mode=True)


def experts_cases():
    x, weight, up, down, up_bias, down_bias = layer(5, 2, 3)
    index, name = ROUTINGS["random"](5, 2, 3), "glu"
    GATES.setdefault(name, GATES[gate()])  # under a name that no version of torch changes
    forward, backward = torch.ops.dtensor.experts.default, torch.ops.dtensor.experts_backward.default
    for biases in ((up_bias, down_bias), (None, down_bias), (None, None)):
        _, hidden = forward(x, index, weight, up, down, *biases, name)
        yield c(forward, x, index, weight, up, down, *biases, name, at_least=3)
        yield c(backward, numbers(8, 5, 6), x, index, weight, up, down, *biases, hidden, name, at_least=3)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_candidates(n):
    check(experts_cases, n)


PLACED = {
    "tokens": ([Shard(0)], [Replicate()]),
    "experts": ([Replicate()], [Shard(0)]),
    "both over one axis": ([Shard(0)], [Shard(0)]),
    "both, each over its own": ([Shard(0), Replicate()], [Replicate(), Shard(0)]),
    "tokens over both axes": ([Shard(0), Shard(0)], [Replicate(), Shard(0)]),
    "experts over both axes": ([Replicate(), Shard(0)], [Shard(0), Shard(0)]),
}


@pytest.mark.parametrize("placed", PLACED)
def test_shards_give_what_one_device_does(placed):
    """Two tokens on four ranks, and three experts: some ranks have none."""
    of_tokens, of_experts = PLACED[placed]

    def rank(rank):
        mesh = init_device_mesh("cpu", (2, 2) if len(of_tokens) == 2 else (4,))
        for tokens in (7, 2):
            given, index = layer(tokens), ROUTINGS["random"](tokens, CHOSEN, EXPERTS)
            at = [of_tokens] * 2 + [of_experts] * 4
            cut = [distribute_tensor(x, mesh, p) for x, p in zip(given, at)]
            dealt = distribute_tensor(index, mesh, of_tokens)
            found, wanted = both(layer_of(dealt), cut), both(functools.partial(expected, index), given)
            torch.testing.assert_close(found, wanted)

    run_threads(rank, 4)


def test_tokens_are_gathered_and_results_scattered():
    """Of sizes that do not depend on the routing; nothing else of the size of tokens moves in a forward."""

    def rank(rank):
        mesh = init_device_mesh("cpu", (2,))
        given = [distribute_tensor(x, mesh, [Shard(0)]) for x in layer(8, e=4)]
        for routing in ROUTINGS:
            index = distribute_tensor(ROUTINGS[routing](8, CHOSEN, 4), mesh, [Shard(0)])
            with CountCollectives() as counts:
                out = experts(given[0], index, *given[1:], gate=gate())
                out.redistribute(placements=[Shard(0)])
            assert Counter(c.op for c in counts.collectives) == {"all_gather": 3, "reduce_scatter": 1}

    run_threads(rank, 2)


def compiled_on_rank(rank: int, folder: str) -> int:
    mesh, name = init_device_mesh("cpu", (2,)), gate()

    def compute(index, x, weight, *rest):
        return experts(x, index, weight, *rest, gate=name)

    run, checked = torch.compile(compute, backend="aot_eager", dynamic=True), 0
    with statistics() as found, dump(folder):
        for tokens in (7, 5, 9):
            for routing in ROUTINGS.values():
                given, index = layer(tokens), routing(tokens, CHOSEN, EXPERTS)
                cut = [distribute_tensor(x, mesh, [Shard(0)]) for x in given]
                dealt = distribute_tensor(index, mesh, [Shard(0)])
                results = both(functools.partial(run, dealt), cut), both(functools.partial(expected, index), given)
                torch.testing.assert_close(*results)
                checked += 1
    assert found.graphs == 1
    texts = [path.read_text() for path in Path(folder, f"rank{rank}").rglob("*.txt")]
    assert any("rows_by_group" in text for text in texts)
    assert not any("_local_scalar_dense" in text for text in texts), "a number is read to the host"
    return checked


def test_a_compiled_layer_is_one_graph_for_any_routing_and_any_number_of_tokens(tmp_path):
    assert run_ranks(compiled_on_rank, 2, str(tmp_path), timeout=120) == [3 * len(ROUTINGS)] * 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3))
def test_grouped_rows(sizes, rest):
    ends = torch.tensor(sizes).cumsum(0).int()
    n = int(ends[-1]) + rest
    x, y, w = numbers(1, n, 3), numbers(2, n, 4), numbers(3, len(sizes), 3, 4)
    out = grouped_rows.rows_by_group(x, w, ends, len(sizes))
    sums = grouped_rows.rows_within_groups(x, y, ends, len(sizes))
    for e, (end, size) in enumerate(zip(ends.tolist(), sizes)):
        rows = slice(end - size, end)
        torch.testing.assert_close(out[rows], x[rows] @ w[e])
        torch.testing.assert_close(sums[e], x[rows].t() @ y[rows])
    assert not out[n - rest :].any()


def test_a_gate_is_named_by_what_it_computes():
    up = layer()[2]

    def clipped(bound):
        return lambda h: h[:, ::2].clamp(max=bound)

    names = [expert_gate(clipped(b), up) for b in (1.0, 1.0, 2.0)]
    assert names[0] == names[1] != names[2]
    h = numbers(1, 8, 8)  # as many rows as columns
    torch.testing.assert_close(GATES[names[2]].forward(h), h[:, ::2].clamp(max=2.0))
    of_h = GATES[names[2]].backward(h, torch.ones(8, 4, dtype=h.dtype))
    torch.testing.assert_close(of_h[:, ::2], (h[:, ::2] <= 2.0).double())


def test_a_gate_may_write_to_its_rows():
    def shifted(h):
        return h[:, :INNER].add_(0.5) * h[:, INNER:]

    given, index = layer(), ROUTINGS["even"](TOKENS, CHOSEN, EXPERTS)
    names = [expert_gate(f, given[2]) for f in (shifted, lambda h: (h[:, :INNER] + 0.5) * h[:, INNER:])]
    found = [both(lambda x, w, *rest: experts(x, index, w, *rest, gate=name), given) for name in names]  # noqa: B023
    torch.testing.assert_close(*found)


def test_what_experts_refuses():
    x, weight, up, down, up_bias, down_bias = layer()
    index = ROUTINGS["even"](TOKENS, CHOSEN, EXPERTS)
    with pytest.raises(ValueError, match=r"experts takes x \(t, d\)"):
        experts(x, index, weight, up.mT, down, gate=gate())
    with pytest.raises(ValueError, match="biases"):
        experts(x, index, weight, up, down, down_bias, up_bias, gate=gate())
    with pytest.raises(TypeError, match=r"write index\.long\(\)"):
        experts(x, weight, weight, up, down, gate=gate())
    with pytest.raises(ValueError, match=r"rows \(n, 8\) and returns rows \(n, f\)"):
        expert_gate(lambda h: h.sum(), up)
    for gate_of_all in (lambda h: h - h.mean(0), lambda h: h * torch.rand_like(h)):
        with pytest.raises(ValueError, match="a row depends on no other row, and on no random number"):
            expert_gate(gate_of_all, up)
    with pytest.raises(ValueError, match="draws random numbers"):
        expert_gate(lambda h: h + 1e-6 * torch.rand_like(h), up)
    with pytest.raises(ValueError, match="reads the tensor"):
        expert_gate(lambda h: glu(h) * x[0, 0], up)
    with pytest.raises(TypeError, match=r"gate=dtensor\.parallel\.expert_gate\(function, up\)"):
        experts(x, index, weight, up, down, gate=glu)
    with pytest.raises(ValueError, match="traced in another process"):
        experts(x, index, weight, up, down, gate="silu")
