"""What starts collectives over gloo, on real ranks: several under way, of all dtypes, uneven, compiled."""

import functools
import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dtensor.comm.start_collectives import FUNCTIONAL, OVER_GLOO, starts
from dtensor.comm.wire_dtypes import CARRIED
from dtensor.testing import run_ranks, run_threads
from dtensor.torch_private.core import c10d

WAIT = c10d.wait_tensor.default


def name_of(group):
    return group.group_name


def part(sender, receiver, rows, k=0, dtype=torch.float32):
    """What a rank sends to another: rows that tell who sent them, to whom."""
    return (torch.full((rows, 3), 10 * sender + receiver) + 100 * k).to(dtype)


def under_way(rank, n):
    """Many at once, waited for in another order, beside a sum; what is gathered is written over after the start."""
    group, draw = name_of(dist.group.WORLD), random.Random(1)
    assert starts(group, torch.device("cpu")) is OVER_GLOO
    assert starts(group, torch.device("cuda")) is OVER_GLOO, "gloo's own end the process"
    for _ in range(20):
        length = draw.choice([1, 5, 3000])
        gathers, exchanges = [], []
        for k in range(3):
            x = part(rank, 0, length, k)
            gathers.append(OVER_GLOO.all_gather(x, n, group))
            x.fill_(-1)
            x = torch.cat([part(rank, r, length, k) for r in range(n)])
            exchanges.append(OVER_GLOO.all_to_all(x, [length] * n, [length] * n, group))
            del x
            _ = torch.full((n * length, 3), -1.0)  # where `x` was, if nobody holds it
        total = c10d.all_reduce(torch.ones(7), "sum", group)
        for k in draw.sample(range(3), 3):
            assert torch.equal(WAIT(exchanges[k]), torch.cat([part(r, rank, length, k) for r in range(n)]))
            assert torch.equal(WAIT(gathers[k]), torch.cat([part(r, 0, length, k) for r in range(n)]))
        assert torch.equal(WAIT(total), torch.full((7,), float(n)))


@pytest.mark.parametrize("n", [2, 3])
def test_several_under_way(n):
    run_ranks(under_way, n, n)


def of_all_kinds(rank, n):
    group = name_of(dist.group.WORLD)
    for dtype in CARRIED:
        x = torch.cat([part(rank, r, 2, dtype=dtype) for r in range(n)])
        want = torch.cat([part(r, rank, 2, dtype=dtype) for r in range(n)])
        assert torch.equal(WAIT(OVER_GLOO.all_to_all(x, [2] * n, [2] * n, group)), want)
        want = torch.cat([part(r, 0, 2, dtype=dtype) for r in range(n)])
        assert torch.equal(WAIT(OVER_GLOO.all_gather(part(rank, 0, 2, dtype=dtype), n, group)), want)
    # rank s sends s + r rows to rank r: none from the first to itself
    x = torch.cat([part(rank, r, rank + r) for r in range(n)])
    want = torch.cat([part(r, rank, rank + r) for r in range(n)])
    splits = [rank + r for r in range(n)]
    assert torch.equal(WAIT(OVER_GLOO.all_to_all(x, splits, splits, group)), want)
    # only the first sends, and only to the last
    sent, received = [0] * n, [0] * n
    sent[-1], received[0] = 4 * (rank == 0), 4 * (rank == n - 1)
    found = WAIT(OVER_GLOO.all_to_all(part(rank, n - 1, sum(sent)), received, sent, group))
    assert torch.equal(found, part(0, n - 1, sum(received)))
    # on what needs gradients, which are no matter here
    x = part(rank, 0, 2).requires_grad_()
    assert torch.equal(WAIT(OVER_GLOO.all_gather(x, n, group)), torch.cat([part(r, 0, 2) for r in range(n)]))
    x = torch.cat([part(rank, r, 2) for r in range(n)]).requires_grad_()
    want = torch.cat([part(r, rank, 2) for r in range(n)])
    assert torch.equal(WAIT(OVER_GLOO.all_to_all(x, [2] * n, [2] * n, group)), want)
    # a message of the program's own in between is not taken for one of ours
    mine = torch.full((2,), float(rank))
    asked = dist.irecv(theirs := torch.zeros(2), (rank - 1) % n)
    started = OVER_GLOO.all_gather(mine * 10, n, group)
    told = dist.isend(mine, (rank + 1) % n)
    assert torch.equal(WAIT(started), torch.arange(n).repeat_interleave(2) * 10.0)
    for message in (asked, told):
        assert message is not None
        message.wait()
    assert torch.equal(theirs, torch.full((2,), float((rank - 1) % n)))


def test_of_all_kinds():
    run_ranks(of_all_kinds, 3, 3)


def compiled(rank, n):
    """Inductor uses memory again as soon as nothing reads it any more, but what is being sent."""
    group = name_of(dist.group.WORLD)

    def f(x, w):
        started = OVER_GLOO.all_to_all(x * 2, [1] * n, [1] * n, group)
        y = torch.mm(w, x)
        return y, WAIT(started), WAIT(OVER_GLOO.all_gather(y, n, group))

    x = torch.arange(n * 4_000_000).view(n, -1).float() + rank
    w = torch.eye(n).flip(0)
    y, *found = torch.compile(f, fullgraph=True)(x, w)
    rows = [x - rank + r for r in range(n)]
    assert torch.equal(y, x.flip(0))
    assert torch.equal(found[0], 2 * torch.stack([row[rank] for row in rows]))
    assert torch.equal(found[1], torch.cat([row.flip(0) for row in rows]))


def test_compiled():
    run_ranks(compiled, 2, 2)


def left_alone(rank):
    """The second rank does not come; the first is told so in time."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            WAIT(OVER_GLOO.all_to_all(torch.ones(2, 3), [1, 1], [1, 1], name_of(group)))
        assert time.monotonic() - began < 20
    dist.barrier()


def test_a_rank_that_does_not_come():
    run_ranks(left_alone, 2)


def test_elsewhere_torchs(fake_mesh):
    group = fake_mesh(4).get_group().group_name
    assert starts(group, torch.device("cpu")) is FUNCTIONAL


SENDERS = ([1, 1, 1], [0, 0, 1], [2, 0, 0], [0, 1, 2], [1, 2, 0])


def permuted(rank):
    """Ranks of which several take what one has, and of which nobody takes anything."""
    group, found = name_of(dist.group.WORLD), []
    for senders in SENDERS:
        x = torch.ops.dtensor.collective_permute(torch.full((2, 2), rank), senders, group)
        found.append(x.unique().tolist())
    return found


@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_a_permutation_may_leave_ranks_out(run):
    assert run(permuted, 3) == [[[senders[rank]] for senders in SENDERS] for rank in range(3)]


def test_a_rank_that_nobody_takes_from_sends_to_itself(fake_mesh):
    """Torch's fake group refuses to send nothing where something is received."""
    group = fake_mesh(3).get_group().group_name
    torch.ops.dtensor.collective_permute(torch.ones(2, 2), [1, 1, 1], group)


def added_up(rank, n):
    """By whichever reduction, of any length, waited for in another order, and written over after the start."""
    group, found = name_of(dist.group.WORLD), []
    by = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}
    for shape in ((5, 7), (1,), (0, 4), (), (64, 3)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            ranks = [(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) % 5 + r).to(dtype) for r in range(n)]
            begun = {}
            for op in by:
                x = ranks[rank].clone().t() if len(shape) == 2 else ranks[rank].clone()
                begun[op] = torch.ops.dtensor.all_reduce_start(x, op, group)
                x.fill_(-1)
            for op in reversed(by):
                want = functools.reduce(by[op], ranks)
                got = WAIT(begun[op])
                assert torch.equal(got.t() if len(shape) == 2 else got, want), (op, shape, dtype)
            found.append(got.tolist())
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_reductions_with_tags(n):
    first, *others = run_ranks(added_up, n, n)
    assert all(other == first for other in others)
