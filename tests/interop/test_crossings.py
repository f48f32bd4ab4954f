"""torch's FSDP2, DDP and styles on modules that are sharded here, and the other way round: one error, or one device."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import parallel as theirs

from dtensor import DTensor, Shard, ShardingError, distribute_model, init_device_mesh
from dtensor import parallel as ours
from dtensor.testing import with_ranks

ROWS = torch.linspace(-1, 1, 64).view(8, 8)
HERE = {"0": ours.ColwiseParallel(), "2": ours.RowwiseParallel()}
THERE = {"0": theirs.ColwiseParallel(), "2": theirs.RowwiseParallel()}

CONVERT = r"is a DTensor of torch\.distributed\.tensor.*write dtensor\.interop\.convert_module\(model\)"
INSTEAD = r"torch\.distributed was given a DTensor.*write fully_shard and the styles of dtensor\.parallel in place of"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def one_after_the_other(*changes):
    def sharded(dp, tp):
        model = net()
        for change in changes:
            model = change(model, dp, tp) or model
        return model

    return sharded


def of(index, change):
    """A change to one module inside."""
    return lambda m, dp, tp: change(m[index], dp, tp) and None


def our_tp(m, dp, tp):
    return ours.parallelize_module(m, tp, HERE)


def their_tp(m, dp, tp):
    return theirs.parallelize_module(m, tp, THERE)


def our_fsdp(m, dp, tp):
    return ours.fully_shard(m, dp)


def their_fsdp(m, dp, tp):
    torch_fsdp.fully_shard(m, mesh=dp)


def our_view(m, dp, tp):
    return distribute_model(m, tp, {"0.weight": [Shard(0)], "2.weight": [Shard(1)]}, outputs={})


def their_ddp(m, dp, tp):
    return nn.parallel.DistributedDataParallel(m, process_group=dp.get_group())


def their_styles_here(m, dp, tp):
    return ours.parallelize_module(m, tp, THERE)


CROSSINGS = {
    "our tp, our fsdp": ((our_tp, our_fsdp), ""),
    "our fsdp, our tp": ((our_fsdp, our_tp), ""),
    "their styles in our tp, our fsdp": ((their_styles_here, our_fsdp), ""),
    "our tp, their fsdp": ((our_tp, their_fsdp), INSTEAD),
    "our tp, their fsdp by units": ((our_tp, of(0, their_fsdp), their_fsdp), INSTEAD),
    "our view, their fsdp": ((our_view, their_fsdp), INSTEAD),
    "our tp, their ddp": ((our_tp, their_ddp), INSTEAD),
    "our fsdp, their tp": ((our_fsdp, their_tp), INSTEAD),
    "our unit in their fsdp": ((of(0, our_fsdp), their_fsdp), INSTEAD),
    "their tp, our fsdp": ((their_tp, our_fsdp), CONVERT),
    "their fsdp, our tp": ((their_fsdp, our_tp), CONVERT),
    "their fsdp, our view": ((their_fsdp, our_view), CONVERT),
    "their tp, their fsdp, our tp": ((their_tp, their_fsdp, our_tp), CONVERT),
    "their fsdp, our fsdp": ((their_fsdp, our_fsdp), CONVERT),
    "their unit in our fsdp": ((of(0, their_fsdp), our_fsdp), CONVERT),
}


def trained(model, run, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def crossed(compiled):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    part = ROWS.chunk(2)[dp.get_local_rank()]
    model = net()
    want = trained(model, model, ROWS)

    def run_all(changes):
        torch.compiler.reset()
        model = one_after_the_other(*changes)(dp, tp)
        options = {"backend": "dtensor", "options": {"inner": "aot_eager"}}
        return trained(model, torch.compile(model, **options) if compiled else model, part)

    for name, (changes, error) in CROSSINGS.items():
        if error:
            with pytest.raises(ShardingError, match=error):
                run_all(changes)
        else:
            for found, wanted in zip(run_all(changes), want, strict=True):
                torch.testing.assert_close(found, wanted, msg=name)


@with_ranks(4)
def test_each_is_right_or_refused(rank):
    crossed(compiled=False)


@pytest.mark.nightly
@with_ranks(4)
def test_each_is_right_or_refused_compiled(rank):
    crossed(compiled=True)
