"""The backend's options, its place in torch.compile, and what it leaves alone; on a fake process group."""

import subprocess
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtensor import DTensor, Replicate, Shard, distribute_tensor
from dtensor.compile import Options, statistics
from dtensor.compile.backends import run_passes
from dtensor.dispatch import dispatch
from dtensor.tensor import plain_passes as hooks
from dtensor.torch_private.compiling import inductor_config
from dtensor.torch_private.core import make_fx, never_traced
from tests.interpreter import python


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"iner": "inductor"}, r"unknown option 'iner' of backend 'dtensor'; did you mean 'inner'\?"),
        ({"inner": "inductr"}, r"unknown inner compiler 'inductr'; did you mean 'inductor'\?"),
        (
            {"passes": ["cancel_gather_shrd"]},
            r"unknown pass 'cancel_gather_shrd' in option 'passes'; did you mean 'cancel_gather_shard'\?",
        ),
        (
            {"disable": ["zzz"]},
            r"unknown pass 'zzz' in option 'disable'; known: raise, common_subexpressions",
        ),
    ],
)
def test_unknown_names_are_named_with_the_nearest(given, message):
    with pytest.raises(ValueError, match=message):
        Options.of(given)


@pytest.mark.parametrize("given", [{"passes": "lower"}, {"disable": [1]}, {"verify": "yes"}])
def test_wrong_types(given):
    with pytest.raises(TypeError, match="got "):
        Options.of(given)


def test_errors_reach_the_user_of_torch_compile(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    compiled = torch.compile(lambda t: t + 1, backend="dtensor", options={"pases": []})
    with pytest.raises(Exception, match=r"unknown option 'pases'.*did you mean 'passes'"):
        compiled(x)
    compiled = torch.compile(lambda t: t + 1, backend="dtensor", mode="max-autotune")
    with pytest.raises(Exception, match="takes no mode, got 'max-autotune'"):
        compiled(x)


def gathered_twice(t):
    whole = t.redistribute(placements=[Replicate()])
    return whole.redistribute(placements=[Shard(0)]) + 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"inner": "aot_eager"}, 0),
        ({"inner": "aot_eager", "disable": ["cancel_gather_shard"]}, 1),
        ({"inner": "aot_eager", "passes": ["lower"]}, 1),
        ({"inner": "inductor"}, 0),
    ],
)
def test_passes_run_as_the_options_say(mesh, options, expected):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with statistics() as s:
        out = torch.compile(gathered_twice, backend="dtensor", fullgraph=True, options=options)(x)
    assert out.placements == (Shard(0),)
    assert len(s.forward) == expected
    assert (s.graphs, s.graph_breaks) == (1, 0)


def test_inner_eager_runs_without_passes(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with statistics() as s:
        out = torch.compile(gathered_twice, backend="dtensor", options={"inner": "eager"})(x)
    assert out.to_local().tolist() == [2.0, 2.0]
    assert s.records == []


def test_plain_compile_has_the_passes_and_can_be_without(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with statistics() as s:
        torch.compile(gathered_twice, fullgraph=True)(x)
    assert len(s.records[0].traced) == 1
    assert s.forward == []
    torch.compiler.reset()
    hooks.uninstall()
    try:
        assert inductor_config.post_grad_custom_pre_pass is None
        with statistics() as s:
            torch.compile(gathered_twice, fullgraph=True)(x)
        assert s.records == []
    finally:
        hooks.install()


def test_passes_are_chained_to_what_was_there():
    seen = []
    before = inductor_config.post_grad_custom_pre_pass
    try:
        inductor_config.post_grad_custom_pre_pass = seen.append
        hooks.install()
        hooks.install()
        chain: Any = inductor_config.post_grad_custom_pre_pass
        assert chain[0] == seen.append
        assert [type(p) for p in chain[1:]] == [hooks.PlainPasses]
    finally:
        inductor_config.post_grad_custom_pre_pass = before


def test_graphs_of_others_are_left_alone(mesh):
    with statistics() as s:
        torch.compile(lambda t: torch.relu(t) + 1)(torch.ones(3))
    assert s.records == []


def test_an_input_that_does_not_verify_is_said_and_compiled(mesh):
    group = mesh.get_group(0).group_name
    x = torch.ones(4)
    gm = make_fx(lambda t: torch.ops.dtensor.all_reduce(t, "sum", group) + 1, tracing_mode="fake")(x)
    (added,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    del added.meta["val"]
    unknown = r"the forward graph is invalid before any pass.*has no meta\['val'\]"
    with pytest.warns(UserWarning, match=unknown), statistics() as s:
        run_passes.optimise(gm.graph, Options())
    assert [c.op for c in s.forward] == ["all_reduce"]
    assert [p.name for p in s.records[0].passes][-3:] == ["pin", "agree", "keep_order"]


def test_backward_graphs_are_told_by_their_tangents():
    graph = torch.fx.Graph()
    graph.placeholder("primals_1")
    assert run_passes.direction(graph, False) == "forward"
    assert run_passes.direction(graph, True) == "inference"
    graph.placeholder("tangents_1")
    assert run_passes.direction(graph, False) == "backward"


def test_all_to_all_goes_through_inductor(mesh):
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    compiled = torch.compile(lambda t: t.redistribute(placements=[Shard(1)]) + 1, fullgraph=True)
    out = compiled(x)
    assert out.placements == (Shard(1),)
    assert out.to_local().shape == (4, 2)


def test_the_name_is_known_without_the_import():
    """Torch finds it as an entry point, and registers what that gives."""
    program = (
        "import torch\n"
        "run = torch.compile(lambda x: x * 2 + 1, backend='dtensor', options={'inner': 'aot_eager'})\n"
        "print(run(torch.ones(2)).tolist())"
    )
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[3.0, 3.0]\n", done.stderr


def test_a_forward_is_traced_once_by_each_that_has_to(mesh):
    """Dynamo, AOTAutograd to see what becomes of the inputs, and the joint graph; no more to see it of their parts."""
    seen = []
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()

    def function(x, plain):
        return x.sin(), plain * 2, x.shape[0]

    def counting(func, *args, **kwargs):
        seen.append(str(func))
        return dispatch.dispatch(func, *args, **kwargs)

    with patch.object(DTensor, "__torch_dispatch__", staticmethod(never_traced(counting))):
        out, *_ = torch.compile(function, backend="dtensor", options={"inner": "aot_eager"})(x, torch.ones(3))
        out.sum().backward()
    assert seen.count("aten.sin.default") == 3


@pytest.mark.parametrize("freezing", [False, True])
def test_inputs_that_are_written_to_and_results_that_are_views_of_them(mesh, freezing):
    """What AOTAutograd is told of parts, where they share memory; constants are made of what does not."""
    x, w = (distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]) for _ in range(2))

    def function(x, plain):
        x.mul_(2)
        return x.view(8), w.t(), (x @ w.t()).sum(), plain.view(-1), plain.add_(1)

    with torch.no_grad(), inductor_config.patch(freezing=freezing):
        given, expected = (x.clone(), torch.ones(2, 2)), (x.clone(), torch.ones(2, 2))
        compiled = torch.compile(function, backend="dtensor")
        for _ in range(2):
            for found, wanted in zip(compiled(*given), function(*expected), strict=True):
                assert torch.equal(*(t.full_tensor() if isinstance(t, DTensor) else t for t in (found, wanted)))
        assert torch.equal(given[0].to_local(), expected[0].to_local())
