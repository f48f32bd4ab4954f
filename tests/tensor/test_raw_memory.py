"""Python's own values of a DTensor that is replicated or has no dimensions: those of one device, eager and compiled."""

import math
import warnings

import numpy as np
import torch

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks, with_threads

OF_ALL = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy().tolist(),
    "asarray": lambda x: np.asarray(x.detach()).tolist(),
    "dlpack": lambda x: torch.from_dlpack(x.detach()).sum().item(),
}
OF_MANY = {
    "iteration": lambda x: [v.sum().item() for v in x],
    "len": len,
    "in": lambda x: (3.0 in x, 99 in x),
    "unpacking": lambda x: [v.tolist() for v in (lambda a, *b: (a, *b))(*x)],
}
OF_ONE = {
    "item": lambda x: x.item(),
    "format": lambda x: (f"{x:>9}", f"expert_{x}", f"{x}"),
    "precision": lambda x: f"{x:.3f}",
    "int": int,
    "float": float,
    "bool": bool,
    "complex": complex,
    "math": lambda x: math.sqrt(x),
    "comparison": lambda x: 1 if x > 2 else 0,
}
OF_ONE_INTEGER = {"index": lambda x: "abcde"[x], "range": lambda x: list(range(x)), "slice": lambda x: "abcde"[:x]}


def cases(mesh):
    """(function, plain tensor, DTensor) of each case."""
    for dtype in (torch.float32, torch.int64):
        many, one = torch.arange(6).view(2, 3).to(dtype), torch.tensor(3).to(dtype)
        for f in (*OF_ALL.values(), *OF_MANY.values()):
            yield f, many, distribute_tensor(many, mesh, [Replicate()])
        for placement in (Replicate(), Partial()):
            for f in (*OF_ALL.values(), *OF_ONE.values(), *(OF_ONE_INTEGER.values() if dtype == torch.int64 else ())):
                yield f, one, distribute_tensor(one, mesh, [placement])


@with_threads(2)
def test_values(rank):
    mesh = init_device_mesh("cpu", (2,))
    for f, plain, x in cases(mesh):
        assert f(x) == f(plain)
    x = distribute_tensor(torch.zeros(3), mesh, [Replicate()])
    x.numpy()[1] = 5.0  # the memory is that of this rank
    assert x.to_local().tolist() == [0.0, 5.0, 0.0]
    assert f"{distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}".startswith("DTensor(")


@with_ranks(2)
def test_compiled(rank):
    """Between two graphs, as `item()`."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    many, one = torch.arange(6).view(2, 3), torch.tensor(3)
    for plain, f in ((many, OF_ALL["tolist"]), (one, OF_ONE["format"])):
        x = distribute_tensor(plain, mesh, [Replicate()])
        torch._dynamo.reset()
        got = torch.compile(lambda x, f=f: (f(x * 1), x + 1), backend="aot_eager")(x)
        assert got[0] == f(plain)
        assert isinstance(got[1], DTensor)
        assert torch.equal(got[1].full_tensor(), plain + 1)
