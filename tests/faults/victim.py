"""One rank of a small training run, in which one rank meets a fault.

    python -m tests.faults.victim CASE RANK PORT FOLDER

The case says where in the program, what happens there, and on which rank. The time is left in FOLDER/fault.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dtensor import Checkpoints, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.compile.backends import backend
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

STEPS = 4
AT = 3
"""The step in which it happens."""


class Faulty:
    """The fault, and whether this rank meets it."""

    def __init__(self, case: dict, rank: int, folder: Path):
        self.where, self.what, self.folder = case["where"], case["what"], folder
        self.mine = rank == case["victim"]
        self.armed = self.where in ("start", "mesh", "eager", "compile", "load")

    def at(self, where: str) -> None:
        """Whatever happens here."""
        if not (self.mine and self.armed and where == self.where):
            return
        self.armed = False
        (self.folder / "fault").write_text(str(time.time()))
        if self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.what == "absent":
            time.sleep(1000)
        raise RuntimeError("the fault")

    def goes_elsewhere(self, where: str) -> bool:
        """Whether this rank does something else than the others here."""
        found = self.mine and self.what == "elsewhere" and where == self.where
        if found:
            (self.folder / "fault").write_text(str(time.time()))
        return found


faulty: Faulty


@torch.library.custom_op("faults::here", mutates_args=())
def here(x: torch.Tensor) -> torch.Tensor:
    """x; the place of a fault inside compiled code, and in its backward."""
    faulty.at("graph")
    return x.clone()


@torch.library.custom_op("faults::there", mutates_args=())
def there(x: torch.Tensor) -> torch.Tensor:
    faulty.at("backward")
    return x.clone()


here.register_fake(torch.empty_like)
there.register_fake(torch.empty_like)
here.register_autograd(lambda ctx, grad: there(grad))


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = torch.relu(self.up(x))
        h = DTensor.from_local(here(h.to_local()), self.mesh, h.placements) if isinstance(h, DTensor) else here(h)
        return self.down(h)


def parallel(model: Model, mesh) -> nn.Module:
    """The model, tensor parallel over the last axis, and fully sharded over the first of two."""
    tp = mesh[mesh.mesh_dim_names[-1]]
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"]) if mesh.ndim > 1 else model


def run(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    faulty.at("start")
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        if world == 4
        else init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    )
    faulty.at("mesh")
    checkpoints = Checkpoints(folder / "checkpoints")
    model = parallel(Model(mesh), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)] * mesh.ndim)
    faulty.at("eager")
    x.redistribute(placements=[Replicate()] * mesh.ndim)

    whole = torch.compile(gathered, backend="dtensor", options={"inner": "aot_eager"})
    total = torch.compile(summed, backend="dtensor", options={"inner": "aot_eager"})
    both = (whole, total)
    if faulty.goes_elsewhere("agreement"):
        total(x)
    whole(x), total(x)
    step = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})
    if faulty.where == "compile":
        optimise = backend.optimise
        backend.optimise = lambda *args, **kwargs: (optimise(*args, **kwargs), faulty.at("compile"))
    for number in range(1, STEPS + 1):
        faulty.armed |= number == AT
        batch = torch.full((4, 8), float(number))
        faulty.at("step")
        out = step(batch)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number >= AT - 1:
            checkpoints.save({"model": model.state_dict()}, number)
        if number == AT and faulty.where in ("known", "known sum"):
            first = both[(faulty.where == "known sum") ^ faulty.goes_elsewhere(faulty.where)]
            first(x)
    faulty.at("load")
    checkpoints.load({"model": model.state_dict()})
    (folder / f"done-{rank}").touch()


def gathered(x):
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) + 1


def summed(x):
    return x.sum().redistribute(placements=[Replicate()] * x.device_mesh.ndim) + 1


def fault_while_saving() -> None:
    from dtensor.state.files import Writer

    write = Writer.write_data

    def torn(self, *args, **kwargs):
        faulty.at("save")
        return write(self, *args, **kwargs)

    Writer.write_data = torn


def main() -> None:
    global faulty
    case, rank, port, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulty = Faulty(case, rank, folder)
    fault_while_saving()
    world = case["ranks"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=10 if case["what"] == "absent" else 600),
    )
    try:
        run(rank, world, folder)
    except Exception:
        if case["what"] != "caught":
            raise
        if rank != case["victim"]:
            raise
        time.sleep(1000)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
