"""What each option of the backend does: strict mode, dumps, replay on simulated ranks; on a fake process group."""

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.comm.collectives import ops
from dtensor.compile import Options, statistics
from dtensor.compile.backends import replay
from dtensor.compile.backends import run_passes as pipeline
from dtensor.dispatch import strictness
from dtensor.errors import PassError, StrictError
from dtensor.mesh.mesh import facts, known_meshes
from dtensor.passes import Pass
from dtensor.passes.graph.simulate import _COLLECTIVES
from dtensor.testing import ModelArgs, Transformer, fake_ranks
from dtensor.torch_private.core import c10d, make_fx

R, S0, S1 = Replicate(), Shard(0), Shard(1)
INNER = pytest.mark.parametrize("inner", ["aot_eager", "inductor"])


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2, names=("tp",))


def compiled(f, inner="aot_eager", **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner, **options})


def whole(x):
    return x.redistribute(placements=[R])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dmp": "x"}, ValueError, r"unknown option 'dmp' of backend 'dtensor'; did you mean 'dump'\?"),
        ({"strict": 1}, TypeError, "option 'strict' is True or False, got 1"),
        ({"verify": "yes"}, TypeError, "option 'verify' is True or False, got 'yes'"),
        ({"dump": True}, TypeError, "option 'dump' is the path of a folder or None, got True"),
        ({"dump": ""}, TypeError, "option 'dump' is the path of a folder or None, got ''"),
        ({"dump": __file__}, ValueError, "option 'dump' is the path of a folder, but .*test_options.py is a file"),
        ({"split_batch": True}, TypeError, "option 'split_batch' is a number of microbatches, got True"),
        ({"split_batch": 0}, ValueError, "option 'split_batch' is a number of microbatches, got 0; write 1 to"),
        ({"disable": None}, TypeError, "option 'disable' is a list of pass names, got None"),
    ],
)
def test_wrong_values(given, error, message):
    with pytest.raises(error, match=message):
        Options.of(given)


def test_options_are_frozen_and_kept_in_one_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Options.of({"dump": "graphs", "disable": ["reduce_after_view"], "passes": None})
    assert made == Options.of({"dump": tmp_path / "graphs", "disable": ("reduce_after_view",)})
    assert hash(made) == hash(Options(dump=str(tmp_path / "graphs"), disable=("reduce_after_view",)))
    assert (made.cacheable, Options().cacheable, Options(verify=True).cacheable) == (False, True, False)
    assert (Options().strict, Options().dump, Options().verify, Options().agreement) == (False, None, False, True)


def matmul(x, w):
    return x @ w


@INNER
def test_strict_raises_what_strict_mode_raises(mesh, inner):
    """Also where the same graph is in the caches, made without; and what is written out compiles."""
    x, w = distribute_tensor(torch.ones(8, 16), mesh, [S0]), distribute_tensor(torch.ones(16, 32), mesh, [S1])
    with strictness.strict(), pytest.raises(StrictError) as eager:
        matmul(x, w)
    with fresh_cache():
        assert compiled(matmul, inner)(x, w).placements == (S1,)
        torch.compiler.reset()
        with pytest.raises(StrictError) as raised:
            compiled(matmul, inner, strict=True)(x, w)
        assert str(eager.value) in str(raised.value)
        assert "write self.redistribute(placements=[Replicate()]) first" in str(raised.value)
        assert not strictness.active()
        out = compiled(lambda x, w: matmul(whole(x), w), inner, strict=True)(x, w)
    assert out.placements == (S1,)


class SoftmaxInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.softmax(0)


@INNER
def test_strict_looks_at_the_backward(mesh, inner):
    x = distribute_tensor(torch.ones(8, 16), mesh, [S0])
    assert compiled(SoftmaxInBackward.apply, inner, strict=True)(x).placements == (S0,)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"aten._softmax.default would redistribute 'self' from \[Shard\(0\)\]"):
        compiled(SoftmaxInBackward.apply, inner, strict=True)(x.requires_grad_())


def test_strict_with_inner_eager_refuses_when_it_runs(mesh):
    x, w = distribute_tensor(torch.ones(8, 16), mesh, [S0]), distribute_tensor(torch.ones(16, 32), mesh, [S1])
    with pytest.raises(StrictError, match=r"aten\.mm\.default would redistribute 'self'"):
        compiled(matmul, "eager", strict=True)(x, w)
    assert not strictness.active()
    assert compiled(matmul, "eager")(x, w).placements == (S1,)


class Wrong(Pass):
    """A pass that computes something else, and says otherwise; `where` is the operator it looks for."""

    name = "wrong"
    stage = "overlap"
    exactness = "bitwise"

    def __call__(self, graph):
        found = [n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor and n.args[1] == 2]
        for node in found:
            node.args = (node.args[0], 3)
        return len(found)


class Breaks(Wrong):
    """A pass that leaves a graph that is not valid."""

    name = "breaks"

    def __call__(self, graph):
        node = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
        node.meta["val"] = node.meta["val"].to(torch.float64)
        return 1


def test_a_graph_that_a_pass_broke_is_written_down(mesh, tmp_path):
    """And found, with no option."""
    x = distribute_tensor(torch.ones(4), mesh, [S0])
    with pytest.raises(Exception, match="after pass 'breaks' the graph is not valid: %mul"):
        compiled(lambda x: whole(x) * 2, dump=tmp_path, passes=[..., Breaks()])(x)
    (written,) = (tmp_path / "rank0").glob("*/03_inference.02_breaks.txt")
    assert "%mul: f64[4]{R} = aten.mul.Tensor" in written.read_text()


@INNER
def test_verify_finds_a_pass_that_computes_something_else(mesh, inner):
    x = distribute_tensor(torch.ones(4), mesh, [S0])

    def f(x):
        return whole(x) * 2

    with fresh_cache():
        assert compiled(f, inner, passes=[..., Wrong()])(x).to_local().tolist() == [3.0] * 4
        torch.compiler.reset()
        message = "pass 'wrong', declared bitwise: computes other values: output 0 on rank 0 of 2"
        with pytest.raises(Exception, match=message):
            compiled(f, inner, verify=True, passes=[..., Wrong()])(x)


def test_verify_finds_it_in_the_backward(mesh):
    x = distribute_tensor(torch.ones(4), mesh, [S0]).requires_grad_()

    class Doubling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    out = compiled(lambda x: Doubling.apply(whole(x)), verify=True, passes=[..., Wrong()])(x)
    with pytest.raises(PassError, match="pass 'wrong'"):
        out.sum().backward()


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_verify_accepts_a_transformer(mesh, sequence):
    """Forward, backward and inference are replayed without a warning, before and after passes that rewrite."""
    args = ModelArgs(dropout_p=0.1, vocab_size=32, max_seq_len=16, n_layers=1)
    model = Transformer.parallelize(Transformer(args), mesh, sequence)
    with statistics() as s:
        compiled(model, verify=True)(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    assert {r.direction for r in s.records} == {"joint", "forward", "backward"}
    assert all(any(p.rewrites for p in r.passes) for r in s.records if r.direction != "joint")


def test_verify_replays_the_draws_of_inductor(mesh):
    """Which take their seeds from a tensor: two replays of a graph draw alike."""
    x = distribute_tensor(torch.ones(64), mesh, [S0])
    with statistics() as s:
        out = compiled(lambda x: whole(x * 2) + torch.nn.functional.dropout(whole(x)), "inductor", verify=True)(x)
    assert {float(n) for n in out.to_local().unique()} <= {0.0, 2.0, 4.0}
    assert [r.direction for r in s.records] == ["joint", "inference"]


def traced(f, *shapes):
    return make_fx(f, tracing_mode="fake")(*[torch.zeros(s) for s in shapes]).graph


def not_replayed(graph, message):
    """Nothing is replayed, with this reason; the passes run."""
    with pytest.warns(UserWarning, match="verify=True, but the forward graph is not replayed on simulated ranks: "):
        assert replay.simulation(graph, "forward") is None
    with pytest.warns(UserWarning, match=message), statistics() as s:
        pipeline.optimise(graph, Options(verify=True))
    assert s.records[0].passes[-1].name == "keep_order"


def test_groups_of_a_mesh_of_two_axes(fake_mesh):
    """All four ranks where the graph communicates over both axes, two where only over one."""
    mesh = fake_mesh(2, 2)
    names = facts(mesh).groups
    dp, tp, both = names[0,], names[1,], names[0, 1]
    made = replay.simulation(traced(lambda x: ops.all_reduce(ops.all_reduce(x, "sum", dp), "sum", tp), (4,)), "joint")
    expected = {dp: ((0, 2), (1, 3)), tp: ((0, 1), (2, 3)), both: ((0, 1, 2, 3),)}
    assert (made.world, dict(made.groups)) == (4, expected)
    made = replay.simulation(traced(lambda x: ops.all_reduce(x, "sum", dp), (4,)), "joint")
    assert (made.world, dict(made.groups)) == (2, {dp: ((0, 1),)})


def test_groups_of_a_slice_are_those_of_the_whole_mesh():
    """Seen from a rank in the middle of eight, of which each slice is two; the default group needs no mesh."""
    with fake_ranks(8, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        one, other = mesh["a"], mesh["c"]
        names = [facts(m).groups[0,] for m in (one, other)]
        made = replay.simulation(
            traced(lambda x: ops.all_reduce(ops.all_reduce(x, "sum", names[0]), "sum", names[1]), (4,)), "joint"
        )
        assert made.world == 4
        assert [made.groups[name] for name in names] == [((0, 2), (1, 3)), ((0, 1), (2, 3))]
        world = dist.group.WORLD.group_name
        made = replay.simulation(traced(lambda x: ops.all_reduce(x, "sum", world), (4,)), "joint")
        assert (made.world, made.groups[world]) == (8, (tuple(range(8)),))


def test_a_group_of_no_mesh_is_not_replayed(fake_mesh):
    fake_mesh(4)
    group = dist.new_group([0, 2]).group_name
    graph = traced(lambda x: ops.all_reduce(x, "sum", group), (4,))
    not_replayed(graph, rf"group '{group}' of ranks \[0, 2\] belongs to no known mesh")


def test_many_ranks_are_not_simulated(fake_mesh):
    group = facts(fake_mesh(17)).groups[0,]
    not_replayed(traced(lambda x: ops.all_reduce(x, "sum", group), (4,)), "its groups join 17 ranks, and at most 16")


def test_large_graphs_are_not_simulated(fake_mesh, monkeypatch):
    monkeypatch.setattr(replay, "MAX_BYTES", 63)
    group = facts(fake_mesh(2)).groups[0,]
    graph = traced(lambda x: ops.all_reduce(x, "sum", group), (4,))
    not_replayed(graph, "its tensors take 0.0 GiB on 2 ranks; at most 0 may be used")
    monkeypatch.setattr(replay, "MAX_BYTES", 64)
    assert replay.simulation(traced(lambda x: ops.all_reduce(x, "sum", group), (4,)), "forward") is not None


UNEVEN = {
    "all_gather": lambda x, group: ops.all_gather(x, 0, 5, group),
    "shard": lambda x, group: ops.shard(x, 0, group),
    "reduce_scatter": lambda x, group: ops.reduce_scatter(x, "sum", 0, group),
    "all_to_all, gathered": lambda x, group: ops.all_to_all(x, 0, 1, 5, group),
    "all_to_all, scattered": lambda x, group: ops.all_to_all(x, 1, 0, 4, group),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_shards_are_not_replayed(fake_mesh, name):
    group = facts(fake_mesh(2)).groups[0,]
    graph = traced(lambda x: UNEVEN[name](x, group) * 2, (3, 2))
    not_replayed(graph, f"{name.split(',')[0]}.* communicates uneven shards, so other ranks have other local")


def test_uneven_rows_of_an_exchange_are_not_replayed(fake_mesh):
    group = facts(fake_mesh(2)).groups[0,]
    for splits, even in (([2, 2], True), ([1, 3], False)):
        graph = traced(lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, splits, splits, group)), (4,))  # noqa: B023
        if even:
            assert replay.simulation(graph, "forward").world == 2
        else:
            not_replayed(graph, "all_to_all_single.* communicates uneven shards")


def test_sizes_that_only_the_data_tell_are_not_replayed(mesh):
    group = facts(mesh).groups[0,]
    f = compiled(lambda x: ops.all_reduce(x.nonzero().sum(), "sum", group), verify=True)
    message = "the inference graph is not replayed.*nonzero.* has data-dependent sizes"
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.warns(UserWarning, match=message),
    ):
        assert f(torch.tensor([0.0, 3.0])).item() == 1


def test_what_does_not_run_there_is_not_replayed(mesh, monkeypatch):
    group = facts(mesh).groups[0,]
    graph = traced(lambda x: ops.all_reduce(x, "sum", group), (4,))
    monkeypatch.setitem(_COLLECTIVES, ops.all_reduce.default, lambda xs, op: 1 / 0)
    not_replayed(graph, "it does not run there even before the passes: simulated .*all_reduce.*: ZeroDivisionError")


def test_groups_that_were_destroyed_are_not_taken_for_others():
    """Names are given again; the facts of a mesh may outlive its groups."""
    with fake_ranks(6):
        before = facts(torch_init_device_mesh("cpu", (2, 3)))
    with fake_ranks(6):
        name = facts(torch_init_device_mesh("cpu", (3, 2))).groups[0,]
        made = replay.simulation(traced(lambda x: ops.all_reduce(x, "sum", name), (4,)), "joint")
        assert (made.world, made.groups[name]) == (3, ((0, 1, 2),))
        assert before.groups[0,] == name
        assert before in known_meshes()
