"""Passes of a program: where they run, that they are verified and dumped, what caches make of them, and mistakes."""

import re

import pytest
import torch
from torch._inductor.utils import fresh_cache

from dtensor import Replicate, Shard, distribute_tensor
from dtensor.compile import Options, statistics
from dtensor.errors import PassError
from dtensor.passes import SIMPLIFY, Pass, insert, replace, run
from dtensor.torch_private.compiling import dynamo_counters
from dtensor.torch_private.core import make_fx

aten = torch.ops.aten


class Named(Pass):
    """A pass that changes nothing; `seen` says when it ran."""

    def __init__(self, name="own", stage="simplify", exactness="bitwise", fingerprint=None):
        self.name, self.stage, self.exactness, self.fingerprint = name, stage, exactness, fingerprint
        self.seen = []

    def __call__(self, graph):
        spaces = {getattr(node.target, "namespace", "") for node in graph.nodes}
        self.seen.append("lowered" if "_c10d_functional" in spaces else "operators" if "dtensor" in spaces else "local")
        return 0


class Doubles(Named):
    """Adds what was multiplied by two to itself, which is the same bits."""

    def __call__(self, graph):
        found = [n for n in graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 2]
        for node in found:
            replace(node, insert(node, aten.add.Tensor, (node.args[0], node.args[0]), like=node))
        return len(found)


@pytest.fixture
def x(fake_mesh):
    return distribute_tensor(torch.ones(4), fake_mesh(2, names=("tp",)), [Shard(0)])


def compiled(f, inner="aot_eager", **options):
    torch.compiler.reset()
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner, **options})


def double(x):
    return x.redistribute(placements=[Replicate()]) * 2


def test_it_runs_in_its_stage_and_is_recorded_and_dumped(x, tmp_path):
    own = Doubles()
    with statistics() as found:
        out = compiled(double, passes=[..., own], dump=tmp_path, verify=True)(x)
    assert out.to_local().tolist() == [2.0] * 4
    records = [p for r in found.records for p in r.passes if p.name == "own"]
    assert [r.rewrites for r in records if r.rewrites] == [1]
    names = [p.name for p in found.records[-1].passes]
    assert names.index("merge_axes") < names.index("own") < names.index("lower")
    (text,) = tmp_path.glob("rank0/*/03_inference.01_own.txt")
    assert "aten.add.Tensor(%all_gather, %all_gather)" in text.read_text()


@pytest.mark.parametrize(
    ("stage", "seen"),
    [("raise", "operators"), ("simplify", "operators"), ("divide", "operators"), ("overlap", "lowered")],
)
def test_what_a_stage_sees(x, stage, seen):
    own = Named(stage=stage)
    compiled(double, passes=[..., own])(x)
    assert set(own.seen) == {seen}


def test_it_runs_where_it_stands(x):
    own = Named()
    with statistics() as found:
        compiled(double, passes=[own, "dead_code", "lower"])(x)
    names = [p.name for p in found.records[-1].passes]
    assert names[:2] == ["own", "dead_code"]
    assert "bucket" not in names
    assert {"agree", "keep_order"} & set(names) == {"agree"}  # aot_eager keeps the order


def test_run_takes_the_order_given(fake_mesh):
    group = fake_mesh(2).get_group().group_name

    def f(x):
        return torch.ops.dtensor.all_reduce(x * 2, "sum", group)

    for passes, first in ([Named(stage="overlap"), *SIMPLIFY], 0), ([*SIMPLIFY, Named()], len(SIMPLIFY)):
        records = run(make_fx(f, tracing_mode="fake")(torch.ones(4)), passes=passes)
        assert records[first].name == "own"


class Wrong(Named):
    def __call__(self, graph):
        found = [n for n in graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 2]
        for node in found:
            replace(node, insert(node, aten.mul.Tensor, (node.args[0], 3), like=node))
        return len(found)


def test_a_wrong_one_is_named(x):
    with pytest.raises(Exception, match="pass 'own', declared bitwise: computes other values") as raised:
        compiled(double, passes=[..., Wrong()], verify=True)(x)
    assert isinstance(raised.value, PassError) or "PassError" in str(raised.value)


@pytest.mark.parametrize("fingerprint", [None, "1"])
def test_without_a_fingerprint_nothing_is_cached(x, fingerprint):
    """Under Inductor, whose cache a second compilation asks."""
    with fresh_cache():
        for own in (Doubles(fingerprint=fingerprint), Named(fingerprint=fingerprint and "2")):
            compiled(double, "inductor", passes=[..., own])(x)
        before = dynamo_counters()["inductor"]["fxgraph_cache_hit"]
        hits = dynamo_counters()["aot_autograd"]["autograd_cache_hit"]
        compiled(double, "inductor", passes=[..., Doubles(fingerprint=fingerprint)])(x)
        found = dynamo_counters()["inductor"]["fxgraph_cache_hit"] - before
        found += dynamo_counters()["aot_autograd"]["autograd_cache_hit"] - hits
    assert (found > 0) == (fingerprint is not None)


def test_keys_tell_passes_apart():
    keys = [Options.of({"passes": p}).fingerprint() for p in (None, [], ["dead_code"], [...], [..., Named()])]
    keys += [Options.of({"passes": [..., Named(fingerprint=f)]}).fingerprint() for f in ("1", "2")]
    assert len(set(keys)) == len(keys)
    same = [Options.of({"passes": [..., Named(fingerprint="1")]}) for _ in range(2)]
    assert same[0].fingerprint() == same[1].fingerprint()
    assert repr(Named(fingerprint="1")) == "Named('own', 'simplify', 'bitwise', '1')"
    assert repr(Named()) != repr(Named())
    assert [o.cacheable for o in (*same, Options.of({"passes": [Named()]}))] == [True, True, False]


class Unfinished(Pass):
    """Declares nothing."""

    def __call__(self, graph):
        return 0


WRONG = [
    ([..., 3], TypeError, "a pass is an instance of a subclass of dtensor.passes.Pass, or the name of one; got 3"),
    ([lambda graph: 0], TypeError, "an instance of a subclass of dtensor.passes.Pass"),
    ([Doubles], TypeError, "Doubles is a class of passes, not a pass; write Doubles()"),
    (Named(), TypeError, "option 'passes' is a list of passes and names of passes, got "),
    ("lower", TypeError, "option 'passes' is a list of passes and names of passes, got 'lower'"),
    ([Unfinished()], TypeError, "the pass Unfinished has no name; write name = 'my_pass' in its class"),
    ([Named(stage="simplfy")], ValueError, "the stage 'simplfy', which does not exist; write one of raise, simplify,"),
    (
        [Named(stage="borders")],
        ValueError,
        "the stage 'borders', which takes passes of this library only; write one of",
    ),
    ([Named(exactness="nearly")], ValueError, "the exactness 'nearly'; write one of bitwise, reassociates, casts"),
    ([Named(fingerprint=7)], TypeError, "the fingerprint of the pass 'own' is text .* or None for no caching; got 7"),
    ([Named(), Named()], ValueError, "there are two passes 'own' in option 'passes'; give yours another name"),
    ([..., Named("bucket")], ValueError, "there are two passes 'bucket' in option 'passes'"),
    ([..., "lower", ...], ValueError, "option 'passes' says ... more than once"),
    (["lowr"], ValueError, "unknown pass 'lowr' in option 'passes'; did you mean 'lower'?"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_mistakes(given, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?").replace("...", r"\.\.\.")):
        Options.of({"passes": given})


def test_what_cannot_be_left_out():
    for name in ("copy_written", "keep_order", "record"):
        with pytest.raises(ValueError, match=re.escape(f"the pass '{name}' in option 'disable' cannot be left out")):
            Options.of({"disable": [name]})
    assert Options.of({"disable": ["pin", "agree", "split_batch"]}).disable == ("pin", "agree", "split_batch")
