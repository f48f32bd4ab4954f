"""How many Python functions an operator calls that has been decided: most of its time is in these."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import fake_ranks, with_ranks
from dtensor.torch_private.core import OTHERS, fastest_binding, without_frame

MOST: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "x @ w, of which x is gathered": (lambda x, w: x @ w, 35),
    "x + x": (lambda x, w: x + x, 5),
    "x.relu()": (lambda x, w: x.relu(), 5),
    "x.t()": (lambda x, w: x.t(), 5),
    "x.to(torch.float64)": (lambda x, w: x.to(torch.float64), 5),
    "x.view(8, 4, 4)": (lambda x, w: x.view(8, 4, 4), 13),
    "x.add_(1)": (lambda x, w: x.add_(1), 9),
    "F.layer_norm(x, (16,))": (lambda x, w: F.layer_norm(x, (16,)), 16),
}
"""Calls of x, sharded on dimension 0, and w, on dimension 1 -> the Python functions that they may call, those of torch
with them: three are what it calls before an operator of any tensor subclass."""


def calls_in(function: Callable[..., Any], *args: Any) -> list[str]:
    """The Python functions that are called, by their names; a generator is one whenever it goes on."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return found[1:]


@with_ranks(2, fresh=True)  # where copies of views live, each operator looks whether one is stale
def test_a_decided_operator_calls_few_python_functions(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(128.0).reshape(8, 16).sin()
    w = torch.arange(512.0).reshape(16, 32).cos()
    given = [distribute_tensor(t, mesh, [Shard(dim)]) for dim, t in enumerate((x, w))]
    for name, (function, most) in MOST.items():
        for _ in range(2):
            function(*given)
        found = calls_in(function, *given)
        assert len(found) <= most, f"{name}: {len(found)} calls: {found}"
    x = x + 3  # three calls of x.add_(1)
    out = given[0] @ given[1]
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), x @ w)
    torch.testing.assert_close(given[0].redistribute(placements=[Replicate()]).to_local(), x)


def test_a_cast_runs_in_torchs_own_binding():
    """Of another name, if that makes the very same call."""
    x, cast = torch.randn(4, 4), torch.ops.aten._to_copy.default
    assert fastest_binding(cast, (x,), {"dtype": torch.float64}) is OTHERS["_to_copy"]
    assert fastest_binding(cast, (x,), {"dtype": torch.float64, "pin_memory": False}) is without_frame(cast)
    made = OTHERS["_to_copy"](x, dtype=x.dtype)
    assert made.data_ptr() != x.data_ptr()
    torch.testing.assert_close(made, x)


def test_a_result_is_on_the_device_of_its_local_tensor():
    """Whatever the device of the last one with the same decision."""
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        for device in ("cpu", "meta", "cpu", "meta"):
            x = DTensor.from_local(torch.zeros(8, 16, device=device), mesh, [Shard(0)])
            assert (x.relu().device.type, x.relu().to_local().device.type) == (device, device)
