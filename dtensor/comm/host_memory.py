"""Memory of the host: `dtensor::to_host` puts a tensor there, `dtensor::from_host_start` begins to fetch it again, and
`_c10d_functional.wait_tensor` waits until it is there.

From a GPU it goes to pinned memory, on a stream of its own, so that it travels while something is computed; the memory
on the device is free when it has arrived. On a CPU the host's memory is a file that is mapped, in the folder for
temporary files (`tempfile.gettempdir`): both ways are copies that are waited for.
"""

import mmap
import os
import tempfile
from typing import Any

import torch

from ..mesh.operator_library import define
from ..torch_private.core import OpOverload, below_autograd, register_work
from .start_collectives import ANY_ORDER

_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    """The stream on which copies between the host and a device wait for each other."""
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    return _streams[device]


class _Arrival(torch.distributed.Work):
    """A copy to a device, for the work that follows there."""

    def __init__(self, event: Any, device: torch.device) -> None:
        super().__init__()
        self.event, self.device = event, device

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream(self.device).wait_event(self.event)
        return True


def _to_host(x: torch.Tensor) -> torch.Tensor:
    with below_autograd():
        if x.device.type == "cpu":
            return _mapped(x).copy_(x)
        stream = _stream(x.device)
        stream.wait_stream(torch.accelerator.current_stream(x.device))
        with stream:
            y = torch.empty_like(x, device="cpu", pin_memory=True)
            y.copy_(x, non_blocking=True)
        x.record_stream(stream)
        return y


def _mapped(x: torch.Tensor) -> torch.Tensor:
    """A tensor like `x` in a mapped file, which is gone when the tensor is."""
    handle, path = tempfile.mkstemp(prefix="dtensor")
    try:
        os.ftruncate(handle, x.nbytes)
        memory = torch.frombuffer(mmap.mmap(handle, x.nbytes), dtype=x.dtype)
    finally:
        os.close(handle)
        os.unlink(path)
    return memory.as_strided(x.shape, torch.empty_like(x, device="meta").stride())


def _from_host_start(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    with below_autograd():
        y = torch.empty_like(x, device=device, pin_memory=False)
        if y.device.type == "cpu":
            return y.copy_(x)
        stream = _stream(y.device)
        stream.wait_stream(torch.accelerator.current_stream(y.device))
        with stream:
            y.copy_(x, non_blocking=True)
            event = stream.record_event()
        y.record_stream(stream)
        register_work(y, _Arrival(event, y.device))
        return y


def _fake_to_host(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="cpu")


def _fake_from_host_start(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(x, device=device)


define("to_host(Tensor x) -> Tensor", _to_host, _fake_to_host, tags=ANY_ORDER)
define("from_host_start(Tensor x, Device device) -> Tensor", _from_host_start, _fake_from_host_start, tags=ANY_ORDER)

to_host: OpOverload = torch.ops.dtensor.to_host.default
"""Puts a tensor that is dense in memory on the host."""

from_host_start: OpOverload = torch.ops.dtensor.from_host_start.default
"""Begins to fetch one from the host."""

__all__ = ["from_host_start", "to_host"]
