"""Which gathers of a joint graph are done again in the backward."""

import torch
from expecttest import assert_expected_inline
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.collectives import KEPT, ops
from dtensor.mesh.provenance import PARAMETER
from dtensor.passes import Regather, text


def joint(bench, f, *shapes, parameters=(), dtype=None):
    """The graph of `f`; what comes after a call of `sin` is taken to be the backward."""
    gm = bench.trace(f, *shapes)
    holders, tag = [n for n in gm.graph.nodes if n.op == "placeholder"], "is_forward"
    for k in parameters:
        holders[k].meta[PARAMETER] = True
    for node in gm.graph.nodes:
        if "sin" in node.name:
            tag = "is_backward"
        if node.op == "call_function":
            node.meta["partitioner_tag"] = tag
    return gm


def marked(gm):
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]


def layer(bench):
    """The gathered weight is read in the forward and, transposed, in the backward."""

    def f(w, x):
        whole = ops.all_gather(w, 0, 8, bench.tp).t()
        return (x @ whole) @ (x @ whole).sin().t() @ x @ whole

    return f


def test_a_parameter_is_gathered_again_with_its_views(bench):
    gm = joint(bench, layer(bench), (4, 4), (4, 4), parameters=[0])
    assert bench.apply(Regather(held=0), gm) == 1
    assert marked(gm) == ["all_gather", "t"]
    assert_expected_inline(
        text(gm, {bench.tp: "tp"}, lambda node: str(getattr(node.meta.get("recompute"), "name", ""))),
        """\
%w_1: f32[4,4] = placeholder
%x_1: f32[4,4] = placeholder
%all_gather: f32[8,4] = dtensor.all_gather(%w_1, 0, 8, tp)  # MUST_RECOMPUTE
%t: f32[4,8] = aten.t(%all_gather)  # MUST_RECOMPUTE
%mm: f32[4,8] = aten.mm(%x_1, %t)
%mm_1: f32[4,8] = aten.mm(%x_1, %t)
%sin: f32[4,8] = aten.sin(%mm_1)
%t_1: f32[8,4] = aten.t(%sin)
%mm_2: f32[4,4] = aten.mm(%mm, %t_1)
%mm_3: f32[4,4] = aten.mm(%mm_2, %x_1)
%mm_4: f32[4,8] = aten.mm(%mm_3, %t)
return %mm_4""",
    )


def test_what_is_no_parameter_is_saved(bench):
    gm = joint(bench, layer(bench), (4, 4), (4, 4))
    assert bench.keeps(Regather(held=0), gm)
    assert marked(gm) == []


def test_casts_before_and_after_belong_to_the_chain(bench):
    def f(w, x):
        whole = ops.all_gather(w.half().t(), 1, 8, bench.tp).float()
        return (x @ whole).sin() @ whole.t()

    gm = joint(bench, f, (4, 4), (4, 4), parameters=[0])
    assert Regather(held=0)(gm.graph) == 1
    assert marked(gm) == ["all_gather", "_to_copy_1"]


def test_a_parameter_that_was_computed_on_is_one_no_more(bench):
    def f(w, x):
        whole = ops.all_gather(w * 2, 0, 8, bench.tp).t()
        return (x @ whole).sin() @ whole.t()

    assert Regather(held=0)(joint(bench, f, (4, 4), (4, 4), parameters=[0]).graph) == 0


def test_what_the_backward_does_not_read_is_left_alone(bench):
    gm = joint(
        bench, lambda w, x: (x @ ops.all_gather(w, 0, 8, bench.tp).t()).sin() + 1, (4, 4), (4, 4), parameters=[0]
    )
    assert Regather(held=0)(gm.graph) == 0


def test_what_the_backward_gathers_is_left_alone(bench):
    gm = joint(
        bench, lambda w, x: ops.all_gather(x.sin(), 0, 8, bench.tp).t() + w.sum(), (4, 4), (4, 4), parameters=[1]
    )
    assert Regather(held=0)(gm.graph) == 0


def test_regions_of_checkpointing_are_left_alone(bench):
    gm = joint(bench, layer(bench), (4, 4), (4, 4), parameters=[0])
    (gather,) = [n for n in gm.graph.nodes if n.name == "all_gather"]
    gather.meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=1)
    assert Regather(held=0)(gm.graph) == 0
    assert Regather(budget=0)(gm.graph) == 0
    assert gather.meta["recompute"] is CheckpointPolicy.MUST_SAVE


def region(bench, communicates, then):
    """A region of checkpointing, of which the last value goes on to `then` and to the backward."""

    def f(w, x):
        inside = ops.all_reduce(x @ w, "sum", bench.tp) if communicates else x @ w
        last = inside + x
        return then(last).sin() @ last

    gm = joint(bench, f, (4, 4), (4, 4))
    for node in gm.graph.nodes:
        if node.name in ("mm", "all_reduce", "add"):
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=1)
    return gm


def test_what_leaves_a_region_is_saved(bench):
    gm = region(bench, True, lambda last: last * 2)
    assert Regather()(gm.graph) == 1
    saved = [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert saved == ["add"]
    assert Regather()(gm.graph) == 0


def test_what_leaves_a_region_that_sends_nothing_is_left_alone(bench):
    assert Regather()(region(bench, False, lambda last: last * 2).graph) == 0
    # And what the backward alone reads.
    assert Regather()(region(bench, True, lambda last: last).graph) == 0


def test_what_the_program_keeps_is_left_alone(bench):
    gm = joint(bench, layer(bench), (4, 4), (4, 4), parameters=[0])
    (gather,) = [n for n in gm.graph.nodes if n.name == "all_gather"]
    gather.meta["custom"] = {KEPT: True}
    assert Regather(held=0)(gm.graph) == 0
    assert marked(gm) == []


def test_a_gather_that_the_forward_alone_reads_is_marked_with_its_equal(bench):
    """A tied weight: the partitioner makes one of both, with the mark of the first."""

    def f(w, x):
        first, second = (ops.all_gather(w, 0, 8, bench.tp).t() for _ in range(2))
        return (x @ first @ first.t() @ second).sin() @ second.t()

    gm = joint(bench, f, (4, 4), (4, 4), parameters=[0])
    assert Regather(held=0)(gm.graph) == 1
    assert {"all_gather", "all_gather_1"} <= set(marked(gm))


def test_a_budget_counts_what_is_freed_and_saves_first_what_takes_longest_per_byte(bench):
    def f(w, x, small):
        whole = ops.all_gather(w, 0, 32, bench.tp).t()
        act = ops.all_gather(x.cos(), 0, 8, bench.tp)
        little = ops.all_gather(small, 0, 4, bench.tp)
        y = (act @ whole).sin()
        return y @ whole.t() + act @ act.t() @ y @ whole.t() + little.sum() * y.sum()

    # Freed: 32*4*4 = 512 bytes of the parameter; of the activation 128 less its shard of 64; 16 of the small one.
    expected = {
        None: ["all_gather", "t", "all_gather_2"],
        0: ["all_gather", "t", "all_gather_1", "all_gather_2"],
        16: ["all_gather", "t", "all_gather_1"],
        79: ["all_gather", "t", "all_gather_1"],
        80: ["all_gather", "t"],
        591: ["all_gather", "t"],
        592: [],
    }
    for budget, names in expected.items():
        gm = joint(bench, f, (16, 4), (4, 4), (2,), parameters=[0, 2])
        Regather(budget, held=0)(gm.graph)
        assert marked(gm) == names, budget


def three(bench, order):
    """Three gathered weights, which the backward reads in the given order."""

    def f(a, b, c):
        whole = [ops.all_gather(w, 0, 8, bench.tp) for w in (a, b, c)]
        y = (whole[0] @ whole[1] @ whole[2]).sin()
        for k in order:
            y = y @ whole[k]
        return y

    return joint(bench, f, (4, 8), (4, 8), (4, 8), parameters=[0, 1, 2])


def test_what_the_backward_reads_first_is_kept_of_the_last(bench):
    for held, names in ((2, ["all_gather"]), (1, ["all_gather", "all_gather_1"]), (3, [])):
        gm = three(bench, (2, 1, 0))
        assert Regather(held=held)(gm.graph) == len(names)
        assert marked(gm) == names


def test_what_is_read_later_is_not_kept(bench):
    """Two would be held for longer than the schedule holds them."""
    gm = three(bench, (2, 0, 1))
    Regather()(gm.graph)
    assert marked(gm) == ["all_gather", "all_gather_1"]
    gm = three(bench, (0, 1, 2))
    Regather()(gm.graph)
    assert marked(gm) == ["all_gather", "all_gather_1", "all_gather_2"]


def test_a_weight_that_is_gathered_twice_is_not_kept(bench):
    """A tied one: from its first gather on, all of the forward would hold it."""

    def f(w, x):
        first, second = (ops.all_gather(w, 0, 8, bench.tp).t() for _ in range(2))
        return (x @ first @ first.t() @ second).sin() @ second.t()

    gm = joint(bench, f, (4, 4), (4, 4), parameters=[0])
    assert Regather()(gm.graph) == 1


def test_a_parameter_that_is_sent_in_eight_bits_is_gathered_again(bench):
    """And not held as it was decoded."""

    def f(w, x):
        rows = ops.all_gather(torch.ops.dtensor.encode_rows(w, 0, torch.float8_e4m3fn), 0, 8, bench.tp)
        whole = torch.ops.dtensor.decode_rows(rows, [8, 4], 0, torch.float8_e4m3fn, torch.float32).t()
        return (x @ whole) @ (x @ whole).sin().t() @ x @ whole

    gm = joint(bench, f, (4, 4), (4, 4), parameters=[0])
    assert bench.apply(Regather(held=0), gm) == 1
    assert marked(gm) == ["all_gather", "decode_rows", "t"]
