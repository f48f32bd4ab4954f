"""What bisection of a graph tells apart, and graphs as plain data and as Python."""

import operator

import pytest
import torch
from torch import fx

from dtensor.comm.collectives import ops
from dtensor.compile.bisect.graphs import examine
from dtensor.compile.bisect.program import NotRebuilt, Program, Ref
from dtensor.compile.bisect.rebuild import Builder
from dtensor.compile.bisect.written import function
from dtensor.errors import PassError
from dtensor.mesh.provenance import PART, RECORD, SENT
from dtensor.passes import CollectiveInfo, Pass, run
from dtensor.passes.graph import ir
from tests.compile.bisect.mutants import MUTANTS, reduce_sums, write_between

FAULTY = MUTANTS[0]


class Of(Pass):
    """A pass that does what it is told with the first addition."""

    stage = "simplify"
    exactness = "bitwise"

    def __init__(self, change, name="own"):
        self.change, self.name = change, name

    def __call__(self, graph):
        node = next((n for n in graph.nodes if n.target is ir.aten.add.Tensor), None)
        return int(node is not None and self.change(node) is not False)


def raises(node):
    node.graph.inserting_before(node)
    raise KeyError("what")


def breaks(node):
    node.meta["val"] = node.meta["val"].double()


def fails(node):
    """Valid on fake tensors, which have no values, and no more."""
    index = torch.ops.aten.full.default
    ir.replace(node, ir.insert(node, torch.ops.aten.gather.default, (node.args[0], 0, _far(node, index)), like=node))


def _far(node, full):
    return ir.insert(node, full, (list(ir.value(node).shape), 99), {"dtype": torch.int64}, like=node)


def subtracts(node):
    if not node.meta.get("done"):
        node.target, node.meta["done"] = ir.aten.sub.Tensor, True


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (raises, "raises", "it raises KeyError: 'what'"),
        (breaks, "invalid", "meta['val'] is f64[4,4], but its arguments give f32[4,4]"),
        (fails, "fails", "the graph does not run: simulated"),
        (subtracts, "values", "other values of output 0 of the graph on all 4 simulated ranks"),
    ],
    ids=["raises", "invalid", "fails", "values"],
)
def test_what_goes_wrong(bench, change, kind, says):
    gm = bench.trace(lambda x, y: (torch.sin(ops.all_reduce(x, "sum", bench.tp) + y),), (4, 4), (4, 4))
    finding = examine(gm.graph, bench.simulation, chosen=[Of(change)], meshes=bench.meshes, where="forward")
    assert finding is not None
    assert (finding.name, finding.problem.kind, finding.where) == ("own", kind, "forward")
    assert says in finding.problem.text
    assert finding.small is not None
    assert len(finding.small.before) <= 4, str(finding)


def test_rounds_that_do_not_end(bench):
    gm = bench.trace(lambda x, y: (x + y,), (4, 4), (4, 4))
    restless = Of(lambda node: True, "dead_code")
    finding = examine(gm.graph, bench.simulation, chosen=[restless], meshes=bench.meshes)
    assert finding is not None
    assert (finding.name, finding.problem.kind, finding.small) == ("dead_code", "endless", None)
    assert "simplification did not reach a fixpoint" in str(finding)


def test_a_later_round(bench):
    """The pass does right in the first round, and goes wrong on what another has made of it."""

    def f(x, y):
        return ops.all_reduce(x, "sum", bench.tp) + ops.all_reduce(y, "sum", bench.tp).view(4, 4)

    gm = bench.trace(f, (4, 4), (16,))
    finding = examine(gm.graph, bench.simulation, chosen=FAULTY.pipeline(), meshes=bench.meshes)
    assert finding is not None
    assert (finding.name, finding.round) == ("add_before_reduce", 0)
    found = examine(
        gm.graph,
        bench.simulation,
        chosen=[p for p in FAULTY.pipeline()[::-1] if p.stage == "simplify"],
        meshes=bench.meshes,
    )
    assert found is not None
    assert (found.name, found.round) == ("add_before_reduce", 1)


def test_a_graph_that_is_wrong_before_any_pass(bench):
    gm = bench.trace(lambda x: ops.all_reduce(x, "sum", bench.tp), (4,))
    next(iter(ir.calls(gm.graph))).meta["val"] = torch.zeros(3)
    with pytest.raises(PassError, match="after pass 'input' the graph is not valid"):
        examine(gm.graph, bench.simulation, meshes=bench.meshes)


def test_symbolic_sizes_become_numbers(bench):
    f = reduce_sums(bench.tp, bench.dp, bench.world)
    gm = bench.trace(f, (6, 4), (6, 4), symbolic=True)
    assert examine(gm.graph, bench.simulation, meshes=bench.meshes) is None
    finding = examine(gm.graph, bench.simulation, chosen=FAULTY.pipeline(), meshes=bench.meshes)
    assert finding is not None
    assert finding.small is not None
    assert [s.kind.shape for s in finding.small.before.steps][:2] == [(3, 2), (3, 2)]


PROGRAMS = [(m.program, m.shapes) for m in MUTANTS]


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(("program", "shapes"), PROGRAMS, ids=[m.name for m in MUTANTS])
def test_as_data_and_as_python_it_is_the_same_graph(bench, program, shapes, lowered):
    gm = bench.trace(program(bench.tp, bench.dp, bench.world), *shapes)
    if lowered:
        run(gm, meshes=bench.meshes)
    data = Program.of(gm.graph)
    assert bench.text(data.build()) == bench.text(gm)
    labels = {bench.tp: "tp", bench.dp: "dp", bench.world: "world"}
    scope = {"torch": torch, "fx": fx, "operator": operator, "Builder": Builder, "CollectiveInfo": CollectiveInfo}
    exec(function("before", data, labels, "It."), scope)
    built = scope["before"](Builder({label: name for name, label in labels.items()}))
    assert bench.text(built) == bench.text(gm)
    assert Program.of(built) == Program.of(data.build())
    for rebuilt in (data.build(), built):
        others = [{key: n.meta.get(key) for key in (RECORD, SENT, PART)} for n in rebuilt.nodes]
        assert others == [{key: n.meta.get(key) for key in (RECORD, SENT, PART)} for n in gm.graph.nodes]


def test_cutting(bench):
    gm = bench.trace(write_between(bench.tp, bench.dp, bench.world), (4, 4), (4, 4))
    data = Program.of(gm.graph)
    written = next(s for s in data.steps if s.is_effect)
    assert len([s for s in data.cut([written.name]).steps if s.is_effect]) == 0
    assert bench.text(data.cut([s.name for s in data.steps]).build()).count("placeholder") == 3
    only = data.returning(data.outputs[:1])
    assert written.name in [s.name for s in only.steps], "what is written stays"
    first = data.steps[0].name
    assert data.without("mm", first).outputs[0] == Ref(first)


def test_what_cannot_be_rebuilt_becomes_an_input(bench):
    gm = bench.trace(lambda x: torch.sin(ops.all_reduce(x, "sum", bench.tp)), (4, 4))
    sin = next(n for n in gm.graph.nodes if n.target is ir.aten.sin.default)
    sin.target = torch.sin
    assert bench.text(Program.of(gm.graph).pruned().build()) == "%sin: f32[4,4] = placeholder\nreturn %sin"
    with pytest.raises(NotRebuilt, match="returns nothing"):
        Program.of(fx.Graph())
