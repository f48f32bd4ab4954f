"""One rank of a program in which only some ranks run something that communicates.

    python -m tests.faults.alone PROGRAM RANK RANKS PORT

It prints "fault" and the time when the ranks part. `PROGRAMS` has for each what the error says, "" if there is none.
"""

import contextlib
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from dtensor import AgreementError, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module


class Pretrained(nn.Sequential):
    """A model with the method that transformers' models have."""

    def save_pretrained(self, folder, state_dict=None):
        raise AssertionError("it was not to come so far")


class Ranks:
    """What the programs use: this rank, the mesh, and tensors on it."""

    def __init__(self, rank: int, ranks: int):
        torch.manual_seed(0)
        self.rank, self.mesh = rank, init_device_mesh("cpu", (ranks,), mesh_dim_names=("d",))
        self.x = distribute_tensor(torch.ones(8, 4), self.mesh, [Shard(0)])
        self.loss = DTensor.from_local(torch.ones(()), self.mesh, [Partial()])
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        self.model = parallelize_module(nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 4)), self.mesh, plan)
        self.sharded = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), mesh=self.mesh)

    def step(self, model):
        model(torch.ones(2, 4)).square().mean().backward()


def item_then_step(r):
    if r.rank == 0:
        print(r.loss.item())
    r.step(r.model)


def item_then_sharded_step(r):
    if r.rank == 0:
        print(f"{r.loss.item():.2f}")
    r.step(r.sharded)


def item_then_compiled_step(r):
    step = torch.compile(r.model, backend="dtensor", options={"inner": "aot_eager"})
    step(torch.ones(2, 4))
    if r.rank == 0:
        print(r.loss.item())
    step(torch.ones(2, 4))


def item_then_first_compiled_step(r):
    if r.rank == 0:
        print(r.loss.item())
    torch.compile(r.model, backend="dtensor", options={"inner": "aot_eager"})(torch.ones(2, 4))


def item_then_end(r):
    if r.rank == 0:
        print(r.loss.item())


def printed(r):
    if r.rank == 0:
        print(r.x.sum().full_tensor())
    dist.barrier()


def item_then_barrier(r):
    if r.rank == 0:
        r.loss.item()
    dist.barrier()


def full_tensor(r):
    if r.rank == 1:
        print(r.x.full_tensor())
    r.step(r.model)


def redistributed(r):
    if r.rank == 0:
        r.x.redistribute(placements=[Shard(1)])
    r.x.redistribute(placements=[Replicate()])


def clipped(r):
    r.step(r.sharded)
    if r.rank == 0:
        torch.nn.utils.clip_grad_norm_(r.sharded.parameters(), 1.0)
    r.step(r.sharded)


def experts(r):
    if r.rank == 0:
        r.sharded(torch.ones(2, 4))
    r.step(r.model)


def swallowed(r):
    try:
        if r.rank == 0:
            raise KeyError("of this rank")
        r.loss.item()
    except KeyError:
        pass
    r.step(r.model)


def order(r):
    for what in (r.loss.item, r.x.full_tensor)[:: 1 if r.rank else -1]:
        what()


def reductions(r):
    """Sums and maxima of the same size, paired by their number."""
    if r.rank == 0:
        r.loss.item()
    DTensor.from_local(torch.ones(()), r.mesh, [Partial("max")]).item()


def large(r):
    """Large sums, which gloo pairs itself and ends the process for."""
    if r.rank == 0:
        DTensor.from_local(torch.ones(9000), r.mesh, [Partial()]).full_tensor()
    DTensor.from_local(torch.ones(20000), r.mesh, [Partial()]).full_tensor()


def in_a_circle(r):
    """Three ranks, groups of two: each waits for the next one."""
    groups = [dist.new_group([k, (k + 1) % 3]) for k in range(3)]
    x = torch.ones(1)
    dist.all_reduce(x, group=groups[r.rank])
    r.loss.item()


def saved_then_end(r):
    model = fully_shard(Pretrained(nn.Linear(4, 4)), r.mesh)
    if r.rank == 0:
        model.save_pretrained("folder")


def saved_then_barrier(r):
    saved_then_end(r)
    dist.barrier()


def saved_then_step(r):
    saved_then_end(r)
    r.step(r.sharded)


def caught_then_barrier(r):
    """Connections were broken, and an operation of torch's own says for what."""
    with contextlib.suppress(AgreementError):
        item_then_step(r)
    dist.barrier()


def slow(r):
    if r.rank == 0:
        time.sleep(20)
    r.step(r.model)


def slow_in_code(r):
    end = time.monotonic() + 20
    while r.rank == 0 and time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    r.loss.item()


def other_inputs(r):
    """The last rank comes late to a difference that the others have raised."""
    if r.rank == 2:
        time.sleep(2)
    r.model(torch.full((4, 4), float(r.rank)))


def other_shapes_at_fsdp(r):
    if r.rank == 1:
        time.sleep(2)
    r.sharded(torch.ones(4, 4 + r.rank))


def caught_and_went_on(r):
    """A rank that goes on after an error does not meet one that has yet to hear of it."""
    if r.rank == 1:
        time.sleep(2)
    for rows in (4, 4000):
        try:
            r.model(torch.full((rows, 4), float(r.rank)))
        except AgreementError as error:
            print(error)
            r.model(torch.ones(rows, 4))


PROGRAMS = {
    "item_then_step": (2, "rank 0 waits in all_reduce"),
    "item_then_sharded_step": (2, "rank 0 waits in all_reduce"),
    "item_then_compiled_step": (2, "rank 0 waits in all_reduce.*rank 1 waits in a compiled graph"),
    "item_then_first_compiled_step": (2, "rank 0 waits in all_reduce.*rank 1 waits in the agreement"),
    "item_then_end": (3, r"rank 0 (waits in|communicates at) .*rank \d has left"),
    "printed": (2, "rank 0 waits in .*rank 1 waits in torch.distributed.barrier"),
    "item_then_barrier": (4, "rank 0 waits in all_reduce.*rank 1 waits in torch.distributed.barrier"),
    "full_tensor": (2, "rank 1 waits in all_gather"),
    "redistributed": (3, r"rank 0 waits in all_to_all.*rank [12] waits in all_gather"),
    "clipped": (2, "rank 0 waits in "),
    "experts": (2, "rank 0 waits in all_gather"),
    "swallowed": (2, "rank 1 waits in all_reduce"),
    "order": (2, "rank 0 waits in all_gather.*rank 1 waits in all_reduce"),
    "reductions": (2, "rank 0 waits in all_reduce"),
    "large": (2, ""),
    "in_a_circle": (3, "rank 0 waits in torch.distributed.all_reduce"),
    "saved_then_end": (2, r"rank 0 (waits in|communicates at) .*rank 1 has left.*save_pretrained"),
    "saved_then_barrier": (2, "rank 0 waits in all_reduce.*rank 1 waits in torch.distributed.barrier.*save_pretrained"),
    "saved_then_step": (2, "rank 0 waits in all_reduce.*rank 1 waits in all_gather.*save_pretrained"),
    "other_inputs": (3, r"ranks \d and \d differ in the values"),
    "other_shapes_at_fsdp": (2, "shapes cannot be multiplied"),
    "caught_then_barrier": (2, "AgreementError:.*ranks wait for each other.*rank 0 waits in all_reduce"),
    "caught_and_went_on": (2, "ranks 0 and 1 differ in the values"),
    "slow": (2, None),
    "slow_in_code": (2, None),
}
"""Program -> ranks, and what all of them say in their error; "" if one may die, None if there is no error."""


def main() -> None:
    name, rank, ranks, port = sys.argv[1], *map(int, sys.argv[2:5])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=600),
    )
    here = Ranks(rank, ranks)
    dist.barrier()
    print("fault", time.time(), flush=True)
    globals()[name](here)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
