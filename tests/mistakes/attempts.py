"""Tries mistakes on a rank, and returns what each raised there."""

import copy
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dtensor
import dtensor.compile
from dtensor import (
    Checkpoints,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    local_map,
    parallel,
    register_sharding,
    safetensors,
)

ROWS = torch.arange(8.0).view(4, 2)
OPTIONS = {"inner": "aot_eager"}


@torch.library.custom_op("mistakes::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unknown.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("mistakes::fresh", mutates_args=())
def fresh(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


@fresh.register_fake
def _(x):
    return x.new_empty(x.shape[1:])


class Heads(nn.Module):
    """Sizes in its code are those of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.o(self.q(x).view(-1, 2, 2).flatten(1))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, input):
        return self.down_proj(self.up_proj(input))


def mlp(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


class Attempts:
    """The names that mistakes are written with, on one rank."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.folder, self.count = rank, Path(folder), 0
        self.mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        self.mesh2 = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        self.mesh3 = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        self.plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}

    def names(self, compiled: bool) -> dict[str, Any]:
        self.count += 1
        tmp = self.folder / str(self.count)
        tmp.mkdir(exist_ok=True)
        mesh = self.mesh
        rows = torch.ones(4, 4)

        def run(fn, *args):
            if compiled:
                torch.compiler.reset()
                fn = torch.compile(fn, backend="dtensor", options=OPTIONS, fullgraph=True)
            return fn(*args)

        def sharded(width: int = 4):
            return parallel.parallelize_module(mlp(width), mesh, self.plan)

        def mixed():
            model = sharded()
            model[1].weight = nn.Parameter(torch.ones(4, 4))
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            return list(model.parameters())

        def saved(state):
            checkpoints = Checkpoints(tmp / "saved")
            checkpoints.save(state, step=1)
            return checkpoints

        def stepped(model, skip=""):
            optimizer = torch.optim.Adam(model.parameters())
            for name, p in model.named_parameters():
                if name != skip:
                    p.grad = torch.ones_like(p)
            optimizer.step()
            return optimizer

        def file(state):
            safetensors.export(state, tmp / "whole.safetensors")
            return tmp / "whole.safetensors"

        return {
            **vars(dtensor),
            **vars(parallel),
            "Checkpoints": Checkpoints,
            "DTensor": DTensor,
            "F": F,
            "Heads": Heads,
            "PLAN": self.plan,
            "Partial": Partial,
            "Path": Path,
            "ROWS": ROWS,
            "ROWS4": rows,
            "Replicate": Replicate,
            "Shard": Shard,
            "SimpleNamespace": SimpleNamespace,
            "classes": lambda n: torch.zeros(n, dtype=torch.long),
            "copy": copy,
            "dist": dist,
            "dtensor": dtensor,
            "file": file,
            "local_map": local_map,
            "mesh": mesh,
            "mesh2": self.mesh2,
            "mesh3": self.mesh3,
            "mixed": mixed,
            "mlp": mlp,
            "named": Named,
            "nn": nn,
            "rank": self.rank,
            "register_sharding": register_sharding,
            "renamed": Named,
            "run": run,
            "safetensors": safetensors,
            "saved": saved,
            "sharded": sharded,
            "stepped": stepped,
            "tmp": tmp,
            "torch": torch,
            "wider": lambda: sharded(8),
            "x": distribute_tensor(ROWS, mesh, [Shard(0)]),
            "x4": distribute_tensor(rows, mesh, [Replicate()]),
            "x8": torch.ones(4, 8),
        }

    def attempt(self, code: str, compiled: bool) -> tuple[str, str, str, bool]:
        """What `code` raises: the class, the message, the whole traceback, and whether it is one of the library's."""
        names = self.names(compiled)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = self.folder / f"mistake{self.count}.py"
                path.write_text(code)
                exec(compile(code, path, "exec"), names)
        except Exception as error:
            shown = "".join(traceback.format_exception(error))
            return type(error).__name__, str(error), shown, isinstance(error, dtensor.ShardingError)
        return "", "", "", False
