"""`python -m tests.cuda.traced FOLDER [PLAN...]`: what is compiled for four GPUs, by plan, without one.

Parameters and inputs are fake CUDA tensors and the ranks are fake, too: all of the compile is as for NCCL, and nothing
runs. Of each graph a file has what computes and what communicates, in order, and what it is estimated to take; views
and the check that ranks agree are left out.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .device import pretend

if __name__ == "__main__":
    pretend()

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor import Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module
from dtensor.testing import fake_ranks

WIDTH, TOKENS = 4096, 2048

LEFT_OUT = {"view", "_unsafe_view", "t", "getitem", "detach", "expand", "unbind", "split", "split_with_sizes"}
LEFT_OUT |= {"agree", "empty"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel(model: nn.Module, mesh) -> None:
    parallelize_module(model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})


def sequence_parallel(model: nn.Module, mesh) -> None:
    plan = {
        "*.norm": SequenceParallel(),
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)


def sharded(model: nn.Module, mesh) -> None:
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def both(model: nn.Module, mesh) -> None:
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["dp"])


PLANS: dict[str, tuple[Callable, dict[str, int]]] = {
    "tp": (tensor_parallel, {"tp": 4}),
    "sp": (sequence_parallel, {"tp": 4}),
    "fsdp": (sharded, {"dp": 4}),
    "hsdp": (sharded, {"replicate": 2, "shard": 2}),
    "2d": (both, {"dp": 2, "tp": 2}),
}


def trace(name: str, folder: Path) -> None:
    """Compile a step of the plan `name`, and dump it."""
    plan, sizes = PLANS[name]
    torch.compiler.reset()
    with fake_ranks(4):
        mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        plan(model, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cuda")
            x = torch.randn(2, TOKENS, WIDTH, device="cuda")
            given = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None) if name == "sp" else x
            options = {"inner": "aot_eager", "dump": str(folder)}
            torch.compile(model, backend="dtensor", fullgraph=True, options=options)(given).sum().backward()
        assert all(p.grad is not None and p.grad.device.type == "cuda" for p in model.parameters())


def told(text: str) -> Iterator[str]:
    """Of a dumped graph, the lines that compute or communicate: name of the operator, result, what is moved."""
    for line in text.splitlines():
        found = re.match(r"%\w+: (.*?) = (?:\w+\.)?(\w+)[.\w]*\(", line)
        if found is None or found[2] in LEFT_OUT:
            continue
        moved = re.search(r"# ([\d,]+ bytes over [^;]*)", line)
        yield f"{found[2]:24} {found[1]}" + (f"  # {moved[1]}" if moved else "")


def summary(folder: Path) -> str:
    """What the dump in `folder` says of its one frame: forward, then backward."""
    (frame,) = folder.glob("rank0/*")
    lines = []
    for name, graph in json.loads((frame / "manifest.json").read_text())["graphs"].items():
        (path,) = frame.glob(f"*_{name}.inner.txt")
        text = path.read_text()
        assert "device=cpu" not in text
        took = ", ".join(f"{graph[key] * 1e3:.3g} ms {key}" for key in ("computing", "communicating", "exposed"))
        lines += [f"{name}: {graph['peak_bytes'] / 2**20:,.0f} MiB at most; {took}", *told(text), ""]
    return "\n".join(lines)


def main(folder: Path, names: Sequence[str]) -> None:
    """See the module."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or PLANS:
        with tempfile.TemporaryDirectory() as dumped:
            trace(name, Path(dumped))
            (folder / f"{name}.txt").write_text(summary(Path(dumped)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
