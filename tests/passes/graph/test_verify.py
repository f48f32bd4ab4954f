"""One planted fault for each rule of the verifier."""

import pytest
import torch

from dtensor.comm.collectives import ops
from dtensor.errors import PassError
from dtensor.passes import verify
from dtensor.passes.graph import ir
from dtensor.passes.graph.verify import Seen
from dtensor.torch_private.core import c10d


def find(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


def use_before_definition(gm, bench):
    find(gm, "mul").append(find(gm, "relu"))


def no_value(gm, bench):
    del find(gm, "relu").meta["val"]


def communicates_no_tensor(gm, bench):
    node = find(gm, "all_reduce")
    node.args = (find(gm, "x_1"), *node.args[1:])
    find(gm, "x_1").meta.clear()


def wrong_shape(gm, bench):
    find(gm, "relu").meta["val"] = find(gm, "mm").meta["val"][:2]


def wrong_dtype(gm, bench):
    find(gm, "relu").meta["val"] = find(gm, "mm").meta["val"].to(torch.bfloat16)


def arguments_that_do_not_fit(gm, bench):
    find(gm, "mm").args = (find(gm, "x_1"), find(gm, "x_1"))


def unknown_group(gm, bench):
    node = find(gm, "all_reduce")
    node.args = (*node.args[:2], "nobody")


def unknown_group_of_start(gm, bench):
    node = find(gm, "all_reduce_1")
    node.args = (*node.args[:2], "nobody")


def unknown_reduction(gm, bench):
    node = find(gm, "all_reduce")
    node.args = (node.args[0], "median", node.args[2])


def unknown_reduction_of_start(gm, bench):
    node = find(gm, "all_reduce_1")
    node.args = (node.args[0], "median", node.args[2])


def never_waited_for(gm, bench):
    wait = find(gm, "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def waited_for_twice(gm, bench):
    wait = find(gm, "wait_tensor")
    with gm.graph.inserting_after(wait):
        gm.graph.call_function(wait.target, wait.args).meta.update(wait.meta)


def used_before_the_wait(gm, bench):
    start = find(gm, "all_reduce_1")
    with gm.graph.inserting_after(start):
        gm.graph.call_function(torch.ops.aten.relu.default, (start,)).meta.update(start.meta)


def start_in_the_output(gm, bench):
    gm.graph.output_node().args = ((find(gm, "mul"), find(gm, "all_reduce_1")),)


def foreign_node(gm, bench):
    other = torch.fx.Graph()
    find(gm, "relu").graph = other


FAULTS = {
    use_before_definition: "'mul'|mul.*uses %relu, which is not defined above it",
    no_value: r"relu.*has no meta\['val'\]",
    communicates_no_tensor: "all_reduce.*communicates a value not known to be a tensor",
    wrong_shape: r"relu.*is f32\[2,6\], but its arguments give f32\[4,6\]",
    wrong_dtype: r"relu.*is bf16\[4,6\], but its arguments give f32\[4,6\]",
    arguments_that_do_not_fit: r"mm.*does not run on the values of its arguments",
    unknown_group: "all_reduce.*there is no process group 'nobody'",
    unknown_group_of_start: "all_reduce_1.*there is no process group 'nobody'",
    unknown_reduction: "all_reduce.*reduces by 'median', which is not one of avg, max",
    unknown_reduction_of_start: "all_reduce_1.*reduces by 'median'",
    never_waited_for: "all_reduce_1.*waited for 0 times",
    waited_for_twice: "all_reduce_1.*waited for 2 times",
    used_before_the_wait: "uses %all_reduce_1 before %wait_tensor waits for it",
    start_in_the_output: "all_reduce_1.*is returned before it is waited for",
    foreign_node: "not valid",
}


def program(bench):
    def f(x, w):
        y = torch.relu(torch.mm(x, w)) * 2
        y = ops.all_reduce(y, "sum", bench.tp)
        return c10d.wait_tensor(c10d.all_reduce(y, "sum", bench.tp))

    return bench.trace(f, (4, 8), (8, 6))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_planted_fault(bench, fault):
    gm = program(bench)
    verify(gm, "tracing")
    fault(gm, bench)
    with pytest.raises(PassError, match=f"after pass 'planted'.*({FAULTS[fault]})"):
        verify(gm, "planted")


def test_unchanged_nodes_are_not_run_again(bench, monkeypatch):
    gm, seen = program(bench), Seen()
    verify(gm, "tracing", seen)
    ran = []
    propagate = ir.propagate
    monkeypatch.setattr(ir, "propagate", lambda node: ran.append(node.name) or propagate(node))
    verify(gm, "nothing", seen)
    assert ran == []
    find(gm, "relu").target = torch.ops.aten.sigmoid.default
    verify(gm, "one", seen)
    assert ran == ["relu"]


def test_calls_that_are_alike_are_run_once(bench, monkeypatch):
    """Alike in all that tells the kind of the result: 1 is not 1.0, and a transposed operand is another."""
    ran = []
    propagate = ir.propagate
    monkeypatch.setattr(ir, "propagate", lambda node: ran.append(node.name) or propagate(node))

    def f(x, i):
        return x + 1, x * 1, x + 1, i.t() + 1, i + 1, i.t() + 1, i + 1.0, i + 1

    gm = bench.trace(f, (3, 4), torch.zeros(4, 4, dtype=torch.int64))
    verify(gm, "tracing")
    assert ran == ["add", "mul", "t", "add_2", "add_3", "add_5"]
    find(gm, "add_6").meta["val"] = find(gm, "add_6").meta["val"].double()
    with pytest.raises(PassError, match=r"%add_6.*meta\['val'\] is f64\[4,4\], but its arguments give i64\[4,4\]"):
        verify(gm, "planted")


def test_graphs_traced_together_share_what_was_seen(bench, monkeypatch):
    """As a joint graph and its forward do, whose nodes are others with the same values."""
    gm, half = program(bench), torch.fx.Graph()
    half.output(half.graph_copy(gm.graph, {}))
    verify(gm, "tracing", Seen.of(gm.graph))
    ran = []
    propagate = ir.propagate
    monkeypatch.setattr(ir, "propagate", lambda node: ran.append(node.name) or propagate(node))
    verify(half, "partition", Seen.of(half))
    assert ran == []
    relu = next(n for n in half.nodes if n.name == "relu")
    relu.meta["val"] = relu.meta["val"].double()
    with pytest.raises(PassError, match=r"%relu.*its arguments give"):
        verify(half, "planted", Seen.of(half))


def test_traced_values_are_not_computed_again(bench, monkeypatch):
    """Only those of what changed after the trace, and of what reads a value that changed."""
    gm, ran = program(bench), []
    propagate = ir.propagate
    monkeypatch.setattr(ir, "propagate", lambda node: ran.append(node.name) or propagate(node))
    seen = Seen.of(gm.graph, traced=True)
    verify(gm, "tracing", seen)
    assert ran == []
    mul = find(gm, "mul")
    mul.target = torch.ops.aten.add.Tensor
    verify(gm, "one", seen)
    assert ran == ["mul"]
    mul.meta["val"] = mul.meta["val"].double()
    with pytest.raises(PassError, match=r"%mul.*meta\['val'\] is f64\[4,6\], but its arguments give f32\[4,6\]"):
        verify(gm, "two", seen)
    mul.target, mul.args = torch.ops.aten.to.dtype, (mul.args[0], torch.float64)
    with pytest.raises(PassError, match=r"%all_reduce.*meta\['val'\] is f32\[4,6\], but its arguments give f64\[4,6\]"):
        verify(gm, "three", seen)


def test_symbolic_sizes_get_no_guards(bench):
    gm = bench.trace(lambda x: ops.all_gather(x, 0, x.shape[0] * 2, bench.tp) @ x.t(), (4, 8), symbolic=True)
    env = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
    guards = len(env.guards)
    verify(gm, "tracing")
    assert len(env.guards) == guards


def test_multiple_results_random_and_written(bench):
    def f(x):
        a, b = torch.ops.aten.split.Tensor(x + torch.rand_like(x), 2)
        x.add_(1)
        return a * b, torch.ops.aten.native_layer_norm.default(x, [8], None, None, 1e-5)

    verify(bench.trace(f, (4, 8)), "tracing")
