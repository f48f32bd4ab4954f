"""What one rank computes with: a roofline.

    seconds = (launch + max(floating-point operations / peak, bytes moved / memory bandwidth)) / efficiency

A product is slower than the peak while it is small: `half_size` is the number of floating-point operations at which it
reaches half of it. What a roofline leaves out, such as exponentials, is in the efficiency.

Communication beside computation takes part of the processor: on GPUs some multiprocessors; on CPUs all of it, but for
gradients, which have the rest of the backward to hide behind: they take what sending as fast as the link does takes.
"""

from dataclasses import dataclass

import torch

from .links import Link


@dataclass(frozen=True)
class Machine:
    """What one rank computes with.

    Attributes:
        flops: floating-point operations per second in float32.
        half: floating-point operations per second in float16 and bfloat16.
        memory: memory bandwidth in bytes per second.
        launch: seconds to start a kernel.
        half_size: floating-point operations of a product that runs at half of the peak.
        overlap: the part of communication that can run beside computation: on CPUs none, as it takes the same cores.
        efficiency: what part of the roofline's speed a model reaches.
        sending: bytes per second at which sending gradients takes all that other communication takes; 0.0: at any.
        host: bytes per second between the device and the host's memory; on a CPU, to and from a mapped file.
        host_start: seconds that a copy to the host or from it takes at least.
    """

    flops: float
    half: float
    memory: float
    launch: float
    half_size: float = 0.0
    overlap: float = 1.0
    efficiency: float = 1.0
    sending: float = 0.0
    host: float = 25e9
    host_start: float = 1e-5

    def taken(self, link: Link, gradients: bool) -> float:
        """The part of the processor that communication over a link takes from computation."""
        slow = min(1.0, link.bandwidth / self.sending) if gradients and self.sending else 1.0
        return (1 - self.overlap) * slow

    def peak(self, dtype: torch.dtype) -> float:
        """Floating-point operations per second in `dtype`."""
        return self.half if dtype in (torch.float16, torch.bfloat16) else self.flops

    def seconds(self, flops: float, moved: float, dtype: torch.dtype, launches: float = 1.0) -> float:
        """Seconds of a kernel, or of a part of one, that computes `flops` and moves `moved` bytes; none if it does
        neither."""
        if not flops and not moved:
            return 0.0
        computing = (flops + self.half_size) / self.peak(dtype) if flops else 0.0
        return (max(computing, moved / self.memory) + launches * self.launch) / self.efficiency


MACHINES = {
    "cpu": Machine(
        flops=50e9, half=50e9, memory=10e9, launch=1e-6, overlap=0.0, sending=1.3e9, host=1.6e9, host_start=7e-5
    ),
    "cuda": Machine(flops=60e12, half=500e12, memory=2.5e12, launch=3e-6),
}
"""Device type -> what one rank has: some cores of a server, or a current accelerator."""

__all__ = ["MACHINES", "Machine"]
