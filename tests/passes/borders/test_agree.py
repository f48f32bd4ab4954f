"""What ranks compare before a graph runs; `tests/compile/backends/test_agreement.py` has the comparison."""

import json

from expecttest import assert_expected_inline

from dtensor.comm.collectives import ops
from dtensor.comm.start_collectives import OVER_GLOO
from dtensor.passes import Agree, Compilation, Lower, collectives
from dtensor.passes.borders import agree
from dtensor.passes.graph import ir


def lowered(bench, f, *shapes):
    gm = bench.trace(f, *shapes)
    Lower()(gm.graph)
    return gm


def two(bench):
    def f(x, y):
        return ops.all_reduce(x.relu(), "sum", bench.tp), ops.all_gather(y, 0, 8, bench.dp)

    return lowered(bench, f, (4,), (4, 2))


def short(text):
    """The text with the arguments of the agreement left out."""
    return "\n".join([line.split("(")[0] if "dtensor.agree" in line else line for line in text.splitlines()])


def test_the_agreement_is_the_first_call(bench):
    gm = two(bench)
    sent = collectives(gm)
    assert bench.apply(Agree(), gm) == 1
    assert collectives(gm) == sent
    assert_expected_inline(
        short(bench.text(gm)),
        """\
%x_1: f32[4] = placeholder
%y_1: f32[4,2] = placeholder
%empty: f32[1] = aten.empty.memory_format([1])
%agree: none = dtensor.agree
%relu: f32[4] = aten.relu(%x_1)
%all_reduce: f32[4] = _c10d_functional.all_reduce(%relu, 'sum', tp)
%wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
%all_gather_into_tensor: f32[8,2] = _c10d_functional.all_gather_into_tensor(%y_1, 2, dp)
%wait_tensor_1: f32[8,2] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
return %wait_tensor, %wait_tensor_1""",
    )
    (agreed,) = [node for node in gm.graph.nodes if "agree" in str(node.target)]
    said = json.loads(agreed.args[1])
    assert {name: entries[0][0] for name, (_, entries) in said.items()} == {
        bench.tp: "all_reduce sum of float32[4]",
        bench.dp: "all_gather of float32[4, 2]",
    }
    assert json.loads(agreed.args[3])[0] == "forward"


def test_under_inductor_the_first_collective_waits_for_it(bench):
    gm = two(bench)
    assert bench.apply(Agree(Compilation("backward", "inductor")), gm) == 1
    assert [line.split(" = ")[1] for line in bench.text(gm).splitlines() if " after " in line] == [
        "_c10d_functional.all_reduce(%relu, 'sum', tp) after [%agree, %empty]"
    ]


def test_a_graph_that_communicates_nothing_has_nothing_to_compare(bench):
    assert bench.keeps(Agree(), lowered(bench, lambda x: ops.shard(x, 0, bench.tp), (4,)))
    assert Agree().taking(Compilation("forward", agreement=False)) is None


def test_over_gloo_an_all_reduce_that_is_the_first_on_its_group_has_tags(bench, monkeypatch):
    """The second needs none, nor the first on a group where a gather with tags comes before it."""

    def f(x, y):
        x = ops.all_reduce(ops.all_reduce(x.relu(), "sum", bench.tp).relu(), "sum", bench.tp)
        return x, ops.all_reduce(ops.all_gather(y, 0, 8, bench.dp), "max", bench.dp)

    gm = lowered(bench, f, (4,), (4, 2))
    for node in gm.graph.find_nodes(op="call_function", target=ir.c10d.all_gather_into_tensor.default):
        node.target = ir.ops.all_gather_start.default
    monkeypatch.setattr(agree, "starts", lambda group, device: OVER_GLOO)
    assert bench.apply(Agree(), gm) == 1
    begun = [str(node.target) for node in ir.communicating(gm.graph)]
    one, other = "dtensor.all_reduce_start.default", "_c10d_functional.all_reduce.default"
    assert begun == [one, other, "dtensor.all_gather_start.default", other]
    (agreement,) = [node for node in gm.graph.nodes if "agree" in str(node.target)]
    assert [untagged for untagged, _ in json.loads(agreement.args[1]).values()] == [False, False]
