"""Where collectives start and are waited for."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import AGAIN
from dtensor.passes import Lower, Schedule
from dtensor.passes.graph import ir
from dtensor.passes.graph.node_order import dependencies, is_effect


def lowered(bench, f, *shapes):
    gm = bench.trace(f, *shapes)
    Lower()(gm.graph)
    return gm


def short(gm):
    """The graph in a word for each node: collectives, waits, and what computes."""
    words = []
    for node in gm.graph.nodes:
        if node.target in ir.STARTS:
            words.append(f"start_{node.all_input_nodes[0].name.removesuffix('_1')}")
        elif node.target is ir.WAIT:
            words.append(f"wait_{node.all_input_nodes[0].all_input_nodes[0].name.removesuffix('_1')}")
        elif node.op == "call_function" and not ir.aliases(node):
            words.append(node.name)
    return " ".join(words)


def test_work_fills_the_time_between_start_and_wait(bench):
    def f(x, y, z):
        late = x @ y
        return late, ops.all_reduce(x @ z, "sum", bench.tp).relu()

    gm = lowered(bench, f, (4, 4), (4, 4), (4, 4))
    assert bench.apply(Schedule(), gm) > 0
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[4,4] = placeholder
%y_1: f32[4,4] = placeholder
%z_1: f32[4,4] = placeholder
%mm: f32[4,4] = aten.mm(%x_1, %z_1)
%all_reduce: f32[4,4] = _c10d_functional.all_reduce(%mm, 'sum', tp)
%mm_1: f32[4,4] = aten.mm(%x_1, %y_1)
%wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(%all_reduce)
%relu: f32[4,4] = aten.relu(%wait_tensor)
return %mm_1, %relu""",
    )


def test_nothing_to_do(bench):
    assert bench.keeps(Schedule(), lowered(bench, lambda x: x.relu() + 1, (4, 4)))
    assert bench.keeps(Schedule(), lowered(bench, lambda x: ops.all_reduce(x.relu(), "sum", bench.tp) + 1, (4, 4)))


def layers(bench):
    """Each layer gathers its weight as it begins."""

    def f(x, *weights):
        for w in weights:
            x = x @ ops.all_gather(w, 0, 4, bench.tp)
        return x

    return f


def test_parameters_are_gathered_one_layer_ahead(bench):
    gm = lowered(bench, layers(bench), (4, 4), (2, 4), (2, 4), (2, 4))
    bench.apply(Schedule(), gm)
    assert_expected_inline(short(gm), "start_arg1 start_arg2 wait_arg1 mm start_arg3 wait_arg2 mm_1 wait_arg3 mm_2")


def test_room_for_more_starts_more(bench):
    gm = lowered(bench, layers(bench), (4, 4), (2, 4), (2, 4), (2, 4))
    bench.apply(Schedule(ahead=10**6), gm)
    assert_expected_inline(short(gm), "start_arg1 start_arg2 start_arg3 wait_arg1 mm wait_arg2 mm_1 wait_arg3 mm_2")


def test_gathers_at_the_top_are_spread(bench):
    def f(x, *weights):
        whole = [ops.all_gather(w, 0, 4, bench.tp) for w in weights]
        for w in whole:
            x = x @ w
        return x

    gm, other = (lowered(bench, g, (4, 4), (2, 4), (2, 4), (2, 4)) for g in (f, layers(bench)))
    for graph in (gm, other):
        bench.apply(Schedule(), graph)
    assert short(gm) == short(other)


@pytest.mark.parametrize("exchange", [False, True])
def test_reductions_needed_at_the_end_are_waited_for_when_too_much_is_in_flight(bench, exchange):
    """What is exchanged is added up when it is waited for, so that the addition holds up no other work."""

    def f(x, y):
        out = []
        for _ in range(4):
            x = x @ y
            out.append(ops.reduce_scatter(x, "sum", 0, bench.tp))
        return out

    words = {}
    for ahead in (0, None, 10**6):
        with bench.exchanging(exchange):
            gm = lowered(bench, f, (4, 4), (4, 4))
        bench.apply(Schedule(ahead), gm)
        words[ahead] = " ".join([w.replace("view", "mm") for w in short(gm).split() if not w.startswith("sum")])
    assert_expected_inline(
        "\n".join(words.values()),
        """\
mm start_mm mm_1 wait_mm start_mm mm_2 wait_mm start_mm_2 mm_3 wait_mm_2 start_mm_3 wait_mm_3
mm start_mm mm_1 wait_mm start_mm mm_2 wait_mm start_mm_2 mm_3 wait_mm_2 start_mm_3 wait_mm_3
mm start_mm mm_1 start_mm mm_2 start_mm_2 mm_3 start_mm_3 wait_mm wait_mm wait_mm_2 wait_mm_3""",
    )


@pytest.mark.parametrize("exchange", [False, True])
def test_what_is_sent_on_starts_when_it_arrives(bench, exchange):
    """Scattered over one axis and summed over the other, as gradients are in hybrid sharding."""

    def f(x, y):
        out = []
        for _ in range(4):
            x = x @ y
            part = ops.reduce_scatter(x, "avg", 0, bench.tp)
            out.append(ops.all_reduce(part, "avg", bench.dp))
        return out

    with bench.exchanging(exchange):
        gm = lowered(bench, f, (4, 4), (4, 4))
    bench.apply(Schedule(), gm)
    words = []
    for node in gm.graph.nodes:
        start = node.all_input_nodes[0] if node.target is ir.WAIT else node
        if start.target in ir.STARTS:
            kind = "sum" if "all_reduce" in start.name else "scatter"
            words.append(f"wait_{kind}" if node.target is ir.WAIT else kind)
        elif "mm" in node.name:
            words.append("mm")
    # Each is scattered while the next product is computed, and summed meanwhile and after.
    again = "mm wait_scatter sum scatter"
    assert " ".join(words) == f"mm scatter {again} {again} {again} wait_scatter sum {' '.join(['wait_sum'] * 4)}"


@pytest.mark.parametrize("ahead", [0, None])
@pytest.mark.parametrize("passed", [False, True])
def test_sums_needed_at_the_end_are_waited_for_there(bench, ahead, passed):
    """Their results stay, in the memory of what they add up: to wait sooner would free nothing. What an operator passes
    to other ranks is waited for as late."""

    def f(x, y):
        out = []
        for _ in range(3):
            x = x @ y
            out.append(ops.collective_permute(x, [1, 0], bench.tp) if passed else ops.all_reduce(x, "sum", bench.tp))
        return out

    gm = lowered(bench, f, (4, 4), (4, 4))
    bench.apply(Schedule(ahead), gm)
    assert_expected_inline(short(gm), "mm start_mm mm_1 start_mm mm_2 start_mm_2 wait_mm wait_mm wait_mm_2")


def test_gathers_in_two_steps_wait_for_the_first(bench):
    def f(x, w):
        whole = ops.all_gather(ops.all_gather(w, 0, 4, bench.tp), 1, 4, bench.dp)
        return x @ x @ whole

    gm = lowered(bench, f, (4, 4), (2, 2))
    bench.apply(Schedule(), gm)
    assert_expected_inline(short(gm), "start_w mm wait_w start_wait_tensor wait_wait_tensor cat mm_1")


@pytest.mark.parametrize("what", ["computed again", "of gradients"])
def test_what_is_computed_again_waits_for_its_turn(bench, what):
    """It depends on nothing that comes before it, and could start in the forward, which would hold it until then."""

    def f(x, w, y):
        for _ in range(3):
            x = ops.all_reduce((x @ w).sigmoid(), "sum", bench.tp).relu()
        x = ops.all_reduce((x.sin() @ w).tanh(), "sum", bench.tp).relu()
        return x * ops.all_reduce(y.cos(), "sum", bench.tp).relu()

    gm = lowered(bench, f, (4, 4), (4, 4), (4, 4))
    nodes = list(gm.graph.nodes)
    for node in nodes[next(k for k, n in enumerate(nodes) if "sin" in n.name) :]:
        node.meta["partitioner_tag"] = "is_backward"
        if what == "computed again" and "cos" in [node.name, *[x.name for x in node.all_input_nodes]]:
            node.meta[AGAIN] = True
    bench.apply(Schedule(), gm)
    words = short(gm).split()
    first = "wait_tanh" if what == "computed again" else "wait_sigmoid"
    assert words.index("start_cos") == words.index(first) - 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_writes_keep_their_side(bench, where):
    def f(x, w):
        y = x.exp()
        if where == "after":
            w.copy_(y)
        whole = ops.all_gather(w, 0, 8, bench.tp)
        out = y @ y @ whole.t()
        if where == "before":
            w.copy_(y)
        return out

    gm = lowered(bench, f, (4, 4), (4, 4))
    bench.apply(Schedule(), gm)
    (copy,) = [k for k, n in enumerate(gm.graph.nodes) if ir.mutates(n)]
    (start,) = [k for k, n in enumerate(gm.graph.nodes) if n.target in ir.STARTS]
    assert (copy < start) == (where == "after")


def test_random_draws_keep_their_order(bench):
    def f(x, y):
        noise = x.bernoulli(0.5)
        return noise + ops.all_reduce(y.bernoulli(0.5), "sum", bench.tp)

    gm = lowered(bench, f, (4, 4), (4, 4))
    bench.apply(Schedule(), gm)
    assert [n.args[0].name for n in gm.graph.nodes if "bernoulli" in n.name] == ["x_1", "y_1"]


def test_effects_of_other_kinds_are_no_order(bench):
    """A rank whose shard is empty has no attention, and other collectives would follow from an assertion there."""

    def f(x):
        torch.ops.aten._assert_async.msg((x > 0).all(), "positive")
        q = x.view(1, 1, 4, 4)
        told = F.scaled_dot_product_attention(q, q, q)
        return told.sum() + torch.rand(2).sum() + torch.rand(3).sum()

    gm = bench.trace(f, (4, 4))
    before = dependencies(gm.graph)
    effects = {node: [x for x in before[node] if is_effect(x)] for node in gm.graph.nodes if is_effect(node)}
    names = {node.name: [x.name for x in found] for node, found in effects.items()}
    assert names == {"_assert_async": [], "rand": [], "rand_1": ["rand"]}


def test_the_norm_of_all_gradients_is_no_chain(bench):
    """Reductions of gradients whose only next collective is that of their norm make room for each other, as those that
    none follows."""

    def f(x, *weights):
        sums, h = [], x
        for w in weights:
            h = h @ w
            sums.append(ops.reduce_scatter(h, "sum", 0, bench.tp))
        norm = ops.all_reduce(sum((g * g).sum() for g in sums), "sum", bench.tp)
        return [g * norm for g in sums]

    gm = lowered(bench, f, *[(4, 4)] * 7)
    bench.apply(Schedule(), gm)
    flying = most = 0
    for node in gm.graph.nodes:
        flying += (node.target in ir.STARTS) - (node.target is ir.WAIT)
        most = max(most, flying)
    assert most == 1
