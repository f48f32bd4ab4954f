"""What the backward of a whole step computes again."""

import torch
from expecttest import assert_expected_inline
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import AGAIN, PARAMETER
from dtensor.passes import Recompute, Regather
from dtensor.torch_private.partitioning import tag_backward

aten = torch.ops.aten


def whole(bench, f, *shapes, parameters=(0,)):
    """The graph of `f`, a whole step; what comes after a call of `sin` is taken to be the backward."""
    gm = bench.trace(f, *shapes)
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for k in parameters:
        holders[k].meta[PARAMETER] = True
    first = next((n for n in gm.graph.nodes if "sin" in n.name), None)
    if first is not None:
        first.meta["autograd_backward"] = True
        first.meta["seq_nr"] = 7  # as of the forward's last operator, whose module is not this one's
    tag_backward(gm.graph)
    assert first is None or "seq_nr" not in first.meta
    return gm


def layer(bench):
    """The gathered weight is read in the forward and, transposed, in the backward."""

    def f(w, x):
        gathered = ops.all_gather(w, 0, 8, bench.tp).t()
        return (x @ gathered).sin() @ gathered.t()

    return f


def test_a_parameter_is_gathered_again(bench):
    gm = whole(bench, layer(bench), (4, 4), (4, 4))
    Regather(held=0)(gm.graph)
    assert bench.apply(Recompute(), gm)
    assert_expected_inline(
        bench.text(gm),
        """\
%w_1: f32[4,4] = placeholder
%x_1: f32[4,4] = placeholder
%all_gather: f32[8,4] = dtensor.all_gather(%w_1, 0, 8, tp)
%t: f32[4,8] = aten.t(%all_gather)
%mm: f32[4,8] = aten.mm(%x_1, %t)
%sin: f32[4,8] = aten.sin(%mm)
%all_gather_1: f32[8,4] = dtensor.all_gather(%w_1, 0, 8, tp)
%t_1: f32[4,8] = aten.t(%all_gather_1)
%t_2: f32[8,4] = aten.t(%t_1)
%mm_1: f32[4,4] = aten.mm(%sin, %t_2)
return %mm_1""",
    )


def test_without_a_mark_a_gather_is_held(bench):
    gm = whole(bench, layer(bench), (4, 4), (4, 4), parameters=())
    Recompute()(gm.graph)
    assert len(gm.graph.find_nodes(op="call_function", target=ops.all_gather.default)) == 1


def test_a_graph_without_a_backward_stays(bench):
    assert bench.keeps(Recompute(), whole(bench, lambda w, x: (x @ w).relu() @ w, (4, 4), (4, 4)))


def test_cheap_values_are_computed_again(bench):
    """The backward reads `relu` and `exp` of a product: of the three values, the product is held."""

    def f(w, x):
        a = x @ w
        b = (a.relu() + 1).exp()
        return (b * 2).sum().sin() * b * a.relu()

    gm = whole(bench, f, (4, 4), (4, 4))
    assert bench.apply(Recompute(), gm)
    later = {n for n in gm.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"}
    read = {x for n in later for x in n.all_input_nodes if x not in later and x.op != "placeholder"}
    assert {n.target for n in read} == {aten.mm.default, aten.sum.default}


def test_random_numbers_are_drawn_once(bench):
    def f(w, x):
        a = (x @ w).bernoulli() * 2
        return a.sum().sin() * a

    gm = whole(bench, f, (4, 4), (4, 4))
    for n in gm.graph.nodes:
        if n.op == "call_function" and "partitioner_tag" not in n.meta:
            n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    Recompute()(gm.graph)
    assert len([n for n in gm.graph.nodes if "bernoulli" in n.name]) == 1


def test_what_follows_the_backward_belongs_to_it(bench):
    """An optimizer's values that depend on no gradient are not held from the forward on."""
    gm = whole(bench, lambda w, x: (w.mul(0.5) - (x @ w).sum().sin() * x).relu(), (4, 4), (4, 4))
    assert not [n for n in gm.graph.nodes if n.name == "relu" and "partitioner_tag" not in n.meta]


def test_what_a_checkpointed_region_hands_on_is_held(bench):
    """Otherwise the backward of the last region would compute all of them again, and hold that."""

    def f(w, x):
        for _ in range(3):
            x = (x @ w).relu() @ w
        return x.sin() @ x @ x

    gm = whole(bench, f, (4, 4), (4, 4))
    forward = [n for n in gm.graph.nodes if n.op == "call_function" and n.meta.get("partitioner_tag") != "is_backward"]
    for k, node in enumerate(forward):
        node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.PREFER_RECOMPUTE, k // 3
    assert [n.name for n in forward][2::3] == ["mm_1", "mm_3", "mm_5"]
    assert bench.apply(Recompute(), gm)
    again = [n for n in gm.graph.nodes if AGAIN in n.meta]
    assert [n.name for n in again] == ["mm_8", "relu_3", "mm_9"]
    assert again[0].args[0].name == "mm_3"
