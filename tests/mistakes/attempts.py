"""What a rank does with the mistakes of the tables, and the names that they are written with."""

import copy
import linecache
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dtensor
import dtensor.compile
from dtensor import Checkpoints, Replicate, Shard, distribute_tensor, init_device_mesh, parallel, safetensors

ROWS = torch.arange(8.0).view(4, 2)


@torch.library.custom_op("mistakes::fresh", mutates_args=())
def fresh(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


class Heads(nn.Module):
    """Sizes in its code are those of the whole."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.o(self.q(x).view(-1, 2, 2).flatten(1))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, input):
        return self.down_proj(self.up_proj(input))


def mlp(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


def stepped(model):
    """An optimizer of `model` with a state."""
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def theirs(x):
    """A DTensor of torch."""
    from torch.distributed.tensor import distribute_tensor as of_torch

    return of_torch(x, torch.distributed.init_device_mesh("cpu", (2,)))


class Attempts:
    """Tries mistakes on one rank.

    Args:
        rank: this rank.
        folder: a folder that all ranks see.
    """

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder, self.count = rank, Path(folder), 0
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.meshes = {
            "mesh": self.mesh,
            "mesh2": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")),
            "mesh3": init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")),
        }
        self.plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}

    def sharded(self, width: int = 4) -> nn.Module:
        return parallel.parallelize_module(mlp(width), self.mesh, self.plan)

    def mixed(self) -> list[nn.Parameter]:
        """Parameters with gradients, of which some are plain."""
        model: Any = self.sharded()
        model[1].weight = nn.Parameter(torch.ones(4, 4))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return list(model.parameters())

    def names(self, compiled: bool) -> dict[str, Any]:
        """The names that a mistake may use."""
        self.count += 1
        tmp = self.folder / str(self.count)
        tmp.mkdir(exist_ok=True)

        def run(fn: Any, *args: Any) -> Any:
            if compiled:
                fn = torch.compile(fn, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)
            return fn(*args)

        def saved(state: dict[str, Any]) -> Checkpoints:
            checkpoints = Checkpoints(tmp / "saved")
            checkpoints.save(state, step=1)
            return checkpoints

        def file(state: dict[str, torch.Tensor]) -> Path:
            safetensors.export(state, tmp / "whole.safetensors")
            return tmp / "whole.safetensors"

        return {
            **{name: getattr(dtensor, name) for name in (*vars(dtensor), *dtensor.__all__)},
            **vars(parallel),
            **self.meshes,
            "F": F,
            "Heads": Heads,
            "Named": Named,
            "PLAN": self.plan,
            "ROWS": ROWS,
            "classes": lambda n: torch.zeros(n, dtype=torch.long),
            "copy": copy,
            "dtensor": dtensor,
            "file": file,
            "fresh": fresh,
            "mixed": self.mixed,
            "mlp": mlp,
            "nn": nn,
            "rank": self.rank,
            "rows": torch.ones(4, 4),
            "run": run,
            "safetensors": safetensors,
            "saved": saved,
            "sharded": self.sharded,
            "stepped": stepped,
            "theirs": theirs,
            "tmp": tmp,
            "torch": torch,
            "x": distribute_tensor(ROWS, self.mesh, [Shard(0)]),
            "y": distribute_tensor(ROWS, self.mesh, [Replicate()]),
        }

    def attempt(self, code: str, compiled: bool) -> "tuple[list[str], str, str]":
        """What `code` raises: the names of the classes of the error, its text, and all that Python prints."""
        names = self.names(compiled)
        path = str(self.folder / f"mistake{self.count}.py")
        linecache.cache[path] = (len(code), None, code.splitlines(keepends=True), path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(compile(code, path, "exec"), names)
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return kinds, str(error), "".join(traceback.format_exception(error))
        finally:
            if compiled:
                torch.compiler.reset()
            dist.barrier()  # nobody is left waiting
        return [], "", ""
