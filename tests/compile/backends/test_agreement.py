"""Agreement: ranks with different graphs all end in one error, and ranks that compile at different times do not."""

import os
import re
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import dtensor.job.job
from dtensor import AgreementError, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.comm.agreement import dumps
from dtensor.job.collective_order import alike, difference, eager
from dtensor.parallel import fully_shard
from dtensor.testing import fake_ranks, run_ranks, with_ranks
from dtensor.testing.processes import TIMEOUT


def compiled(f, inner="aot_eager", **options):
    return torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": inner, **options})


def whole(x):
    return x.redistribute(placements=[Replicate()])


INNER = ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]


def refused(f, *args):
    """The message of the error that the call ends in, long before the time-out of the ranks."""
    start = time.monotonic()
    with pytest.raises(AgreementError) as raised:
        f(*args)
    assert time.monotonic() - start < TIMEOUT / 4
    return str(raised.value)


@pytest.mark.parametrize("inner", INNER)
@with_ranks(2)
def test_different_reductions(rank, inner):
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(4), mesh, [Partial("max" if rank else "sum")])
    text = refused(compiled(lambda x: whole(x) + 1, inner), x)
    assert text.startswith("ranks 0 and 1 run compiled graphs that communicate differently")
    assert "rank 0, collective 0 of 1: all_reduce sum of float32[4], from " in text
    assert "rank 1, collective 0 of 1: all_reduce max of int32[4], from " in text
    assert "test_agreement.py:" in text


@pytest.mark.parametrize("inner", INNER)
@with_ranks(2)
def test_swapped_order(rank, inner):
    mesh = init_device_mesh("cpu", (2,))
    x, y = distribute_tensor(torch.ones(4), mesh, [Shard(0)]), distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])

    def f(x, y):
        return (whole(x), whole(y)) if rank == 0 else (whole(y), whole(x))

    text = refused(compiled(f, inner, disable=["bucket"]), x, y)
    assert "rank 0, collective 0 of 2: all_gather of float32[2]" in text
    assert "rank 1, collective 0 of 2: all_gather of float32[2, 2]" in text
    # In a bucket they are as many bytes in either order, and would be taken for each other.
    text = refused(compiled(f, inner), x, y)
    assert "rank 0, collective 0 of 1: all_gather of float32[2], float32[2, 2]" in text
    assert "rank 1, collective 0 of 1: all_gather of float32[2, 2], float32[2]" in text


@with_ranks(3)
def test_one_rank_of_three_communicates_less(rank):
    """Those that agree with each other are told, too."""
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(torch.ones(6), mesh, [Shard(0)])

    def f(x):
        out = whole(x * 2)
        return out if rank == 1 else whole(out.sum(0, keepdim=True) * x)

    text = refused(compiled(f), x)
    assert "rank 1, collective 1 of 1: none" in text
    assert "collective 1 of 2: all_gather of float32[2], from " in text


@with_ranks(4)
def test_ranks_that_agree_with_their_peers_are_told_of_those_that_do_not(rank):
    """On each axis ranks 0 and 1 agree with each other; on the first one they would wait for ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    y = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial("max" if rank == 3 else "sum")])

    def f(x, y):
        return x.redistribute(placements=[Replicate(), Replicate()]) + y.redistribute(placements=[Replicate()] * 2)

    text = refused(compiled(f, disable=["merge_axes"]), x, y)
    assert text.startswith("ranks 2 and 3 run compiled graphs that communicate differently")
    # Nothing was sent: what all ranks do alike works.
    assert compiled(lambda x: x.redistribute(placements=[Replicate()] * 2))(x).to_local().sum() == 16


@with_ranks(2)
def test_a_rank_fails_while_it_compiles(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])

    def f(x):
        return whole(x) + torch.sort(x).values

    if rank == 1:
        with pytest.raises(Exception, match="strict"):
            compiled(f, strict=True)(x)
    else:
        text = refused(compiled(f), x)
        assert text.startswith("rank 1 failed while it compiled: StrictError: ")
    assert compiled(lambda x: whole(x) + 2)(x).to_local().tolist() == [3.0] * 4
    # The same failure on both is nobody's news.
    with pytest.raises(Exception, match="strict"):
        compiled(f, strict=True)(x)
    assert compiled(lambda x: whole(x) + 3)(x).to_local().tolist() == [4.0] * 4


def test_a_failure_of_another_rank_is_not_raised_within_a_trace(fake_mesh):
    """There it would be wrapped as one of the compiler, and told to all a second time, as this rank's own."""
    x = distribute_tensor(torch.ones(4), fake_mesh(2), [Shard(0)])
    with mock.patch.object(eager, "raises", mock.Mock(side_effect=AgreementError("of another rank"))):
        assert compiled(whole, agreement=False)(x).shape == (4,)
        with pytest.raises(AgreementError, match="of another rank"):
            whole(x)


@with_ranks(2)
def test_backward(rank):
    """Forward graphs agree, backward graphs do not."""
    mesh = init_device_mesh("cpu", (2,))
    x, y = (distribute_tensor(torch.ones(n), mesh, [Shard(0)]).requires_grad_() for n in (4, 8))
    grad = [Replicate() if rank else Partial()]

    def f(x, y):
        return whole(x).to_local(grad_placements=grad).sum() + whole(y).to_local(grad_placements=[Partial()]).sum()

    out = compiled(f, disable=["bucket"])(x, y)
    assert out.item() == 12.0
    text = refused(out.backward)
    assert "rank 0, collective 1 of 2: reduce_scatter sum of float32[4]" in text
    assert "rank 1, collective 1 of 1: none" in text


@with_ranks(2)
def test_one_rank_compiles_anew_where_the_other_does_not(rank):
    """Guards on what only one rank sees are no divergence: what runs communicates alike."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])

    f = compiled(lambda x, k: whole(x) + k)
    for k in ((1, 1, 1, 1), (2, 3, 4, 5))[rank]:
        assert f(x, float(k)).to_local().tolist() == [1.0 + float(k)] * 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (1, 2)[rank]


@with_ranks(4)
def test_a_rank_that_comes_late_to_another_mesh_is_waited_for(rank):
    """Of two groups of the same ranks, each has run one graph; that is no disagreement."""
    meshes = [init_device_mesh("cpu", (2, 2)) for _ in range(2)]
    x, y = (distribute_tensor(torch.ones(n), m, [Replicate(), Shard(0)]) for n, m in zip((4, 6), meshes))

    def gathered(x):
        return x.redistribute(placements=[Replicate()] * 2) * 2

    f, g = compiled(gathered), compiled(lambda y: gathered(y))
    before = dtensor.job.job.PATIENCE, dtensor.job.job.PULSE
    dtensor.job.job.PATIENCE, dtensor.job.job.PULSE = 0.2, 0.1
    try:
        f(x)
        time.sleep(2 if rank == 1 else 0)
        assert g(y).to_local().tolist() == [2.0] * 6
    finally:
        dtensor.job.job.PATIENCE, dtensor.job.job.PULSE = before


def reduced_by(rank, folder, *jobs):
    """What a process gives that reduces by `ops[rank]`, for each `ops` of the jobs, with the compile caches in
    `folder`; or what it is refused. And how often the cache had it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    mesh, hits, given = init_device_mesh("cpu", (2,)), torch._dynamo.utils.counters["aot_autograd"], []
    for ops in jobs:
        x, before = DTensor.from_local(torch.ones(6), mesh, [Partial(ops[rank])]), hits["autograd_cache_hit"]
        f = compiled(lambda x: whole(x) * 3, "inductor")
        found = f(x).to_local().tolist() if ops[0] == ops[1] else refused(f, x)
        given.append((found, hits["autograd_cache_hit"] - before))
    return given


@pytest.mark.nightly
def test_graphs_from_the_cache_are_compared(tmp_path):
    """The list of collectives is in the compiled code, and so in what the cache gives back in another process."""
    jobs = run_ranks(reduced_by, 2, str(tmp_path), ("sum", "sum"), ("max", "max"), fresh=True)
    for (one, other), expected in zip(zip(*jobs), (6.0, 3.0)):
        assert one[0] == other[0] == [expected] * 6
        assert sorted([one[1], other[1]]) == [0, 1]  # one rank compiles for both
    for ((text, hits),) in run_ranks(reduced_by, 2, str(tmp_path), ("sum", "max"), fresh=True):
        assert hits == 1
        assert "rank 1, collective 0 of 1: all_reduce max of int32[6]" in text


def test_nothing_is_sent_before_the_agreement():
    """Also by a rank whose part is empty, so that what it sends is made of nothing."""
    seen = {}

    def look(nodes):
        for node in nodes:
            kernel = getattr(node.node, "python_kernel_name", None) or ""
            seen[kernel] = {x.get_name() for x in node.get_outputs()}, {d.name for d in node.unmet_dependencies}
        return nodes

    with fake_ranks(2, 1), fresh_cache(), inductor_config.patch(_pre_fusion_custom_pass=look):
        x = distribute_tensor(torch.ones(1, 1, 4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        compiled(lambda x: whole(F.avg_pool2d(x, 2)), "inductor")(x)
    told, _ = seen["torch.ops.dtensor.agree.default"]
    (first,) = [needs for kernel, (_, needs) in seen.items() if "all_gather" in kernel]
    assert told & first


@with_ranks(2)
def test_switched_off(rank):
    """Without the comparison the ranks go on: here to a gather of another shape, of the same bytes."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])

    def f(x):
        return whole(x.view(4, 2) if rank else x.view(8))

    f_checked, f_unchecked = compiled(f), compiled(f, agreement=False)
    assert f_unchecked(x).to_local().sum() == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTENSOR_AGREEMENT", "0")
        assert f_checked(x).to_local().sum() == 8
    assert "all_gather" in refused(f_checked, x)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of float32[4, 8]", True),
        ("all_reduce sum of float32[4, 8]", "all_reduce max of float32[4, 8]", False),
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of float32[8, 4]", False),
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of bfloat16[4, 8]", False),
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of float32[?, 8]", True),
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of float32[?, 4]", False),
        ("all_reduce sum of float32[4]", "all_reduce sum of float32[4, 8]", False),
        ("all_gather of float32[]", "all_reduce sum of float32[]", False),
        ("collective_permute from (1, 0) of float32[2]", "collective_permute from (0, 1) of float32[2]", False),
    ],
)
def test_what_is_alike(one, other, expected):
    assert alike([(one, "a.py:1")], [(other, "b.py:2")]) is expected
    assert alike([(one, "")] * 2, [(other, "")]) is False
    if not expected:
        text = difference({3: [(one, "a.py:1")], 1: [(other, "")]})
        assert text.splitlines()[1:3] == [
            f"  rank 1, collective 0 of 1: {other}",
            f"  rank 3, collective 0 of 1: {one}, from a.py:1",
        ]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_a_gather_is_said_to_be_where_the_layer_is_called(monkeypatch):
    """Not in the library, and by the name of the file alone: the text is a part of the code of the graph."""
    told = []

    def noted(sequences, untagged):
        told.extend(where for entries in sequences.values() for _, where in entries)
        return dumps(sequences, untagged)

    monkeypatch.setattr("dtensor.passes.borders.agree.dumps", noted)
    with fake_ranks(2):
        model = fully_shard(Layers(), init_device_mesh("cpu", (2,)))
        options = {"inner": "aot_eager"}
        torch.compile(model, backend="dtensor", options=options)(torch.ones(2, 4)).sum().backward()
    assert len(told) == 2  # one bucket in each direction
    assert all(re.fullmatch(r"test_agreement\.py:\d+", where) for where in told)
