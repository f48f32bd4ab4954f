"""A batch that is computed in parts, which take turns to communicate."""

import pytest
import torch
from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.mesh.provenance import PARAMETER, PART
from dtensor.passes import Bucket, Lower, Schedule, SplitBatch, collectives, run
from dtensor.passes.graph import ir
from dtensor.passes.overlap.split_batch import FEWEST
from dtensor.torch_private.core import FakeTensorMode

aten = torch.ops.aten


def traced(bench, f, *shapes, parameters=(), **kwargs):
    """The graph of `f`; `parameters` are the places of arguments that are some."""
    gm = bench.trace(f, *shapes, **kwargs)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if i in parameters:
            node.meta[PARAMETER] = True
    return gm


def two_layers(bench):
    """Two products, after each of which is summed over ranks."""

    def f(x, w, v):
        h = ops.all_reduce(x @ w, "sum", bench.tp).relu()
        return ops.all_reduce(h @ v, "sum", bench.tp)

    return traced(bench, f, (8, 4), (4, 4), (4, 4), parameters=(1, 2))


def lengths(gm, op):
    """The first lengths of what the collectives called `op` give."""
    return [ir.value(node).shape[0] for node in ir.calls(gm.graph, op)]


def calls(gm, target):
    return gm.graph.find_nodes(op="call_function", target=target)


def test_attention_runs_on_halves(bench):
    """Its rule has a function for empty shards, which are no reason to run it on the whole batch."""

    def f(x, w, v):
        h = ops.all_reduce(x @ w, "sum", bench.tp)
        return ops.all_reduce(
            torch.nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True) @ v, "sum", bench.tp
        )

    gm = traced(bench, f, (4, 2, 8, 16), (16, 16), (16, 16), parameters=(1, 2))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert len(calls(gm, attention)) == 1
    assert bench.apply(SplitBatch(), gm) == 2
    assert [ir.value(node)[0].shape[0] for node in calls(gm, attention)] == [2, 2]


def flash(h, grad):
    kernel, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    out = kernel(h, h, h, 0.0, True)
    return out[0], backward(grad, h, h, h, *out[:6], 0.0, True, *out[6:8])[0]


def efficient(h, grad):
    kernel, backward = (
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_efficient_attention_backward,
    )
    out = kernel(h, h, h, None, True, 0.0, True)
    return out[0], backward(grad, h, h, h, None, *out, 0.0, [True, True, True, False], True)[0]


def cudnn(h, grad):
    kernel, backward = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward
    out = kernel(h, h, h, None, True, 0.0, True)
    return out[0], backward(grad, h, h, h, *out[:2], *out[6:8], None, *out[2:6], 0.0, True)[0]


@pytest.mark.parametrize("attention", [flash, efficient, cudnn])
def test_attention_of_gpus_runs_on_halves(bench, attention):
    """On fake tensors: seeds that nothing is drawn with, numbers and missing outputs are those of any part."""

    def f(x, w, grad):
        out, gradient = attention(ops.all_reduce(x @ w, "sum", bench.tp), grad)
        return ops.all_reduce(out @ w, "sum", bench.tp), gradient

    with FakeTensorMode():
        shapes = (4, 2, 8, 16), (16, 16), (4, 2, 8, 16)
        x, w, grad = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        gm = traced(bench, f, x, w, grad, parameters=(1,))
        assert SplitBatch()(gm.graph) == 2
        gm.graph.lint()
        assert SplitBatch()(gm.graph) == 0
    name = attention.__name__
    found = [ir.value(node)[0].shape[0] for node in gm.graph.nodes if f"_{name}_attention" in str(node.target)]
    assert found == [2, 2, 2, 2]


def test_layers_run_on_halves(bench):
    gm = two_layers(bench)
    assert bench.apply(SplitBatch(), gm) == 2
    assert_expected_inline(
        bench.text(gm),
        """\
%x_1: f32[8,4] = placeholder
%w_1: f32[4,4] = placeholder
%v_1: f32[4,4] = placeholder
%slice: f32[4,4] = aten.slice.Tensor(%x_1, 0, 0, 4)
%mm: f32[4,4] = aten.mm(%slice, %w_1)
%slice_1: f32[4,4] = aten.slice.Tensor(%x_1, 0, 4, 8)
%mm_1: f32[4,4] = aten.mm(%slice_1, %w_1)
%all_reduce: f32[4,4] = dtensor.all_reduce(%mm, 'sum', tp)
%all_reduce_1: f32[4,4] = dtensor.all_reduce(%mm_1, 'sum', tp)
%relu: f32[4,4] = aten.relu(%all_reduce)
%relu_1: f32[4,4] = aten.relu(%all_reduce_1)
%mm_2: f32[4,4] = aten.mm(%relu, %v_1)
%mm_3: f32[4,4] = aten.mm(%relu_1, %v_1)
%all_reduce_2: f32[4,4] = dtensor.all_reduce(%mm_2, 'sum', tp)
%all_reduce_3: f32[4,4] = dtensor.all_reduce(%mm_3, 'sum', tp)
%cat: f32[8,4] = aten.cat([%all_reduce_2, %all_reduce_3], 0)
return %cat""",
    )


def test_halves_take_turns(bench):
    gm = two_layers(bench)
    SplitBatch()(gm.graph)
    Lower()(gm.graph)
    assert Bucket()(gm.graph) == 0
    Schedule()(gm.graph)
    words = []
    for node in gm.graph.nodes:
        if node.target in ir.STARTS or node.target is ir.WAIT or node.target is aten.mm.default:
            words.append(f"{node.target.__name__.partition('.')[0]}:{node.meta[PART]}")
    assert " ".join(words) == (
        "mm:0 all_reduce:0 mm:1 all_reduce:1 wait_tensor:0 mm:0 all_reduce:0 wait_tensor:1 mm:1 all_reduce:1 "
        "wait_tensor:0 wait_tensor:1"
    )


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_any_number_of_parts(bench, parts):
    def f(x, w):
        return ops.all_reduce(ops.all_reduce(x @ w, "sum", bench.tp).relu() @ w, "max", bench.tp)

    gm = traced(bench, f, (6, 4), (4, 4), parameters=(1,))
    assert bench.apply(SplitBatch(parts), gm) == 2
    assert lengths(gm, "all_reduce") == [6 // parts] * 2 * parts


def test_collectives_along_other_dimensions(bench):
    def f(x):
        x = ops.all_gather(x.relu(), 1, 8, bench.tp)
        x = ops.all_to_all(x, 2, 1, 8, bench.tp)
        x = ops.reduce_scatter(x, "sum", 2, bench.tp)
        return ops.shard(ops.all_reduce(x, "sum", bench.dp), 1, bench.tp)

    gm = traced(bench, f, (2, 4, 4))
    assert bench.apply(SplitBatch(), gm) == 4
    for op in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "shard"):
        assert lengths(gm, op) == [1, 1], op


def test_what_communicates_along_the_batch_runs_whole(bench):
    def f(x):
        x = ops.all_reduce(ops.all_reduce(x.relu(), "sum", bench.tp) * 2, "sum", bench.dp)
        return ops.all_gather(x, 0, 8, bench.tp), ops.reduce_scatter(x, "sum", 0, bench.tp)

    gm = traced(bench, f, (4, 4))
    assert bench.apply(SplitBatch(), gm) == 2
    assert lengths(gm, "all_reduce") == [2] * 4
    assert lengths(gm, "all_gather") == [8]
    assert lengths(gm, "reduce_scatter") == [2]
    assert len(calls(gm, aten.cat.default)) == 1


def test_the_batch_is_followed_through_views_and_transposition(bench):
    def f(x, w):
        h = ops.all_reduce(x.flatten(0, 1) @ w, "sum", bench.tp).view(4, 3, 2, 2).transpose(0, 2)
        assert h.shape == (2, 3, 4, 2)
        h = ops.all_gather(h.softmax(-1), 0, 4, bench.tp).transpose(0, 2).reshape(12, 8)
        return h @ h.new_ones(8, 2)

    gm = traced(bench, f, (4, 3, 5), (5, 4), parameters=(1,))
    assert bench.apply(SplitBatch(), gm) == 2
    assert lengths(gm, "all_reduce") == [6, 6]
    assert [tuple(ir.value(n).shape) for n in ir.calls(gm.graph, "all_gather")] == [(4, 3, 2, 2)] * 2


def test_gradients_of_parameters_are_added_up(bench):
    def f(x, w, tangents):
        h = ops.all_reduce(x @ w, "sum", bench.tp)
        g = ops.all_reduce(tangents @ w.t(), "sum", bench.tp)
        return h, g, x.t() @ tangents, tangents.sum(0)

    gm = traced(bench, f, (8, 4), (4, 4), (8, 4), parameters=(1,))
    assert bench.apply(SplitBatch(), gm) == 2
    assert len(calls(gm, aten.add.Tensor)) == 2
    assert lengths(gm, "all_reduce") == [4] * 4


def test_a_sum_larger_than_what_it_is_made_of_is_computed_whole(bench):
    def f(x, y, index):
        h = ops.all_reduce(ops.all_reduce(x, "sum", bench.tp).relu(), "sum", bench.dp)
        return h, aten.embedding_dense_backward(h, index, 100, -1, False)

    gm = traced(bench, f, (4, 4), (4, 4), torch.zeros(4, dtype=torch.int64))
    assert bench.apply(SplitBatch(), gm) == 2
    (whole,) = calls(gm, aten.embedding_dense_backward.default)
    assert whole.args[0].target is aten.cat.default


def test_random_draws_stay_as_they_were(bench):
    def f(x):
        h = ops.all_reduce(x * torch.rand_like(x), "sum", bench.tp)
        return ops.all_reduce(torch.dropout(h, 0.5, True), "sum", bench.dp)

    gm = traced(bench, f, (4, 4))
    assert bench.apply(SplitBatch(), gm) == 2
    random = [n for n in gm.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert [tuple(ir.value(n).shape) for n in random] == [(4, 4)] * 2


def test_several_results_and_views_that_are_read_whole(bench):
    def f(x, w):
        h, mean, _ = torch.native_layer_norm(ops.all_reduce(x, "sum", bench.tp), (4,), w, w, 1e-5)
        a, b = ops.all_reduce(h, "sum", bench.dp).split(2, 1)
        return a.cumsum(0), b.t().sort(1).values, a + b, mean, h.sort(0).values

    gm = traced(bench, f, (4, 4), (4,), parameters=(1,))
    assert bench.apply(SplitBatch(), gm) == 2
    assert len(calls(gm, aten.native_layer_norm.default)) == 2
    assert len(calls(gm, aten.split.Tensor)) == 3  # of halves, for the sum; of the whole, for the others
    assert [ir.value(n).shape[0] for n in calls(gm, aten.add.Tensor)] == [2, 2]


def test_a_view_of_a_part_that_is_not_contiguous_copies(bench):
    def f(x, y):
        h = ops.all_reduce(ops.all_reduce(x, "sum", bench.tp).t(), "sum", bench.tp)
        return (h * y).view(2, 2, 4)

    gm = traced(bench, f, (4, 4), (4, 4), parameters=(1,))
    assert bench.apply(SplitBatch(), gm) == 2


@pytest.mark.parametrize(
    ("shape", "why"),
    [((5, 4), "five are not halves"), ((0, 4), "nothing to halve"), ((), "no dimension")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_batches_that_are_not_split(bench, shape, why):
    def f(x):
        return ops.all_reduce(ops.all_reduce(x.relu(), "sum", bench.tp) + 1, "max", bench.tp)

    assert bench.keeps(SplitBatch(), traced(bench, f, shape)), why


def test_graphs_that_are_left_alone(bench):
    def once(x):
        return ops.all_reduce(x.relu(), "sum", bench.tp)

    def along(x):
        return ops.all_gather(ops.reduce_scatter(x.relu(), "sum", 0, bench.tp) * 2, 0, 4, bench.tp)

    def twice(x):
        return once(once(x))

    assert FEWEST == 2
    assert bench.keeps(SplitBatch(), traced(bench, once, (4, 4)))
    assert bench.keeps(SplitBatch(), traced(bench, along, (4, 4)))
    assert bench.keeps(SplitBatch(), traced(bench, twice, (4, 4), symbolic=True))
    assert bench.keeps(SplitBatch(), traced(bench, twice, (4, 4), parameters=(0,)))
    assert not bench.keeps(SplitBatch(), traced(bench, twice, (4, 4)))


def test_in_the_pipeline_the_bytes_stay(bench):
    gm = two_layers(bench)
    sent = [sum(c.bytes for c in collectives(gm.graph))]
    (record,) = [
        r for r in run(gm, passes=["reduce_after_view", SplitBatch()], simulate=bench.simulation) if r.rewrites
    ]
    assert (record.name, record.exactness) == ("split_batch", "reassociates")
    sent.append(sum(c.bytes for c in collectives(gm.graph)))
    assert sent[0] == sent[1] > 0
