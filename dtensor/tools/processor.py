"""Measures what a rank computes with, for `dtensor.search`: products by size and dtype, memory bandwidth, a launch.

    seconds of a product = launch + (floating-point operations + half size) / peak

The efficiency is that of a layer of a Transformer, forward and backward, against what `dtensor.predict` says of it. The
two constants of each dtype are fitted by least squares of the relative error over square products. On CPUs the
measurement uses as many threads as torch does in this process, which should be those of a rank.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from ..parallel.search.search import predict
from ..parallel.whole_model.plan import Plan
from ..prices.machine import MACHINES, Machine

SIZES = {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 4096, 8192)}
"""Device type -> lengths of the sides of the products."""

MEMORY = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Device type -> elements that are copied to measure the memory bandwidth."""


LAYER = {"cpu": (256, 512, torch.float32), "cuda": (4096, 8192, torch.bfloat16)}
"""Device type -> width, number of tokens and dtype of the layer by which the efficiency is measured."""


def measure(device: str = "cpu", rounds: int = 9) -> Machine:
    """Measure a processor; takes a few seconds.

    Args:
        device: "cpu" or "cuda".
        rounds: measurements of each call; the time is their median.

    Returns:
        The machine, for the argument of the same name of `dtensor.search`.
    """
    tiny = torch.zeros(1, device=device)
    launch = _seconds(lambda: tiny.add_(1), device, 100 * rounds)
    x = torch.zeros(MEMORY[device], device=device)
    y = torch.zeros_like(x)
    copied = _seconds(lambda: y.copy_(x), device, rounds)
    peaks: dict[torch.dtype, tuple[float, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        flops, times = [], []
        for n in SIZES[device]:
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            flops.append(2.0 * n**3)
            times.append(max(1e-9, _seconds(lambda a=a, b=b: a @ b, device, rounds) - launch))
        peaks[dtype] = fit(flops, times)
    (single, size), (half, _) = peaks[torch.float32], peaks[torch.bfloat16]
    usual = MACHINES[device]
    roofline = Machine(single, half, 2 * x.nbytes / copied, launch, size, usual.overlap, sending=usual.sending)
    return replace(roofline, efficiency=_efficiency(roofline, device, rounds))


def _efficiency(roofline: Machine, device: str, rounds: int) -> float:
    """What part of the roofline's speed forward and backward of a Transformer's layer reach."""
    dim, tokens, dtype = LAYER[device]
    layer = nn.TransformerEncoderLayer(
        dim, 4, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, device=device, dtype=dtype
    )
    x = torch.randn(4, tokens // 4, dim, device=device, dtype=dtype)

    def step() -> None:
        layer.zero_grad()
        layer(x).sum().backward()

    taken = _seconds(step, device, rounds)
    one = {"x": 1}
    predicted = predict(layer, one, x, Plan(one), machine=roofline, device_type=device).prediction
    assert predicted is not None
    return min(1.0, predicted.computing / taken)


def fit(flops: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return peak and half size of products that took these times without their launch."""
    a = np.stack([np.asarray(flops), np.ones(len(flops))], 1) / np.asarray(seconds)[:, None]
    per, fixed = np.linalg.lstsq(a, np.ones(len(flops)), rcond=None)[0]
    if per <= 0 or fixed <= 0:
        per, fixed = float(np.median(np.asarray(seconds) / np.asarray(flops))), 0.0
    return float(1 / per), float(fixed / per)


def _seconds(run: Callable[[], object], device: str, rounds: int) -> float:
    taken: list[float] = []
    for _ in range(rounds + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


__all__ = ["fit", "measure"]
