"""`dtensor.compile.StepLog`: a line every n steps of training: speed, utilization, communication, memory, recompiles.

    step 20: 81.2 ms, 12,345 tokens/s, MFU 41.2 %, exposed 3.20 ms, memory 1.23 GB, 0 recompiles, loss 3.214

Between two lines a step adds two numbers. What a line is computed from stands in a line before the first one.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from dtensor.errors import ArgumentError, ArgumentTypeError
from dtensor.torch_private.compiling import recompiled

from ..recording.frames import Frame
from .report import frames_of

SIDE = {"cpu": 1024, "cuda": 8192}
"""Device type -> the length of the sides of the products by which the peak is measured."""

ROUNDS = 5
"""Products that are measured; the fastest counts."""


@runtime_checkable
class ScalarWriter(Protocol):
    """What TensorBoard's `SummaryWriter` has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one value."""
        ...


@runtime_checkable
class DictWriter(Protocol):
    """What a run of W&B has."""

    def log(self, data: dict[str, float], step: int) -> Any:
        """Write the values of a step."""
        ...


class StepLog:
    """Logs training: call `step` at the end of each step, on all ranks.

        log = StepLog(model, every=10, peak=989e12, to=SummaryWriter())
        for batch in batches:
            loss = train(batch)
            log.step(tokens=batch.numel(), loss=loss)

    Rank 0 prints and writes; its numbers are those of rank 0, but for the tokens. Every n-th step waits for the GPU,
    no other. The first line counts what was compiled before it.

    Args:
        model: what was given to `torch.compile`, or what it returned; None for everything that was compiled. FLOP and
            exposed communication of a step are estimated from its graphs (`dtensor.compile.report`), forward and
            backward, without what the backward computes again.
        every: the number of steps for each line.
        flops: floating-point operations of a step on a rank, in place of the estimate.
        exposed: seconds of a step in which a rank only waits for communication, in place of the estimate.
        calls: how often the model is called in a step, such as the microbatches of gradient accumulation.
        peak: floating-point operations per second that a rank could do at most; None measures them with a product of
            matrices, which takes less than a second.
        dtype: the dtype of that product.
        to: writers that have `add_scalar(name, value, step)` or `log(dict, step=)`, such as those of TensorBoard and
            W&B, neither of which is imported here.
        echo: prints a line; `print` unless given, None for none.

    Raises:
        TypeError: a writer has neither method.
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any] | None = None,
        *,
        every: int = 10,
        flops: float | None = None,
        exposed: float | None = None,
        calls: int = 1,
        peak: float | None = None,
        dtype: torch.dtype = torch.float32,
        to: ScalarWriter | DictWriter | Sequence[ScalarWriter | DictWriter] = (),
        echo: Callable[[str], Any] | None = print,
    ) -> None:
        for name, value in (("every", every), ("calls", calls), ("flops", flops), ("peak", peak)):
            if value is not None and value <= 0:
                raise ArgumentError(f"{name} is {value}; write a number greater than 0")
        writers: tuple[Any, ...] = tuple(to) if isinstance(to, (list, tuple)) else (to,)
        for writer in writers:
            if not isinstance(writer, (ScalarWriter, DictWriter)):
                raise ArgumentTypeError(
                    f"to={writer!r} has neither add_scalar(name, value, step) nor log(dict, step=); give a "
                    "SummaryWriter of TensorBoard or a run of W&B, or an object with one of the two"
                )
        self.model: nn.Module | Callable[..., Any] | None = model
        self.every: int = every
        self.calls: int = calls
        self.to: tuple[Any, ...] = writers
        self.echo: Callable[[str], Any] | None = echo
        self.flops: float | None = flops
        self.exposed: float | None = exposed
        self.device: str = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = dtype
        self.peak: float = measured_peak(self.device, dtype) if peak is None else peak
        self._said = "measured" if peak is None else "given"
        self._headed: bool = False
        self._steps: int = 0
        self._tokens: int = 0
        self._recompiled: int = recompiled()
        self._since: float = time.perf_counter()

    def step(self, tokens: int = 0, **values: Any) -> dict[str, float] | None:
        """End a step.

        Args:
            tokens: the tokens of this step, on all ranks together.
            **values: what else to log, such as `loss=loss`: numbers or tensors of one element. They are read every n-th
                step, on all ranks, as reading a DTensor may communicate.

        Returns:
            Every n-th step the values by name, else None: "seconds" (of a step), "tokens_per_second", "mfu" (0 to 1),
            "exposed_seconds", "memory_bytes", "recompiles" (since the last line), and `values`. What is not known is
            absent.
        """
        self._steps += 1
        self._tokens += tokens
        if self._steps % self.every:
            return None
        if self.device == "cuda":
            torch.cuda.synchronize()
        made = self._measured() | {name: _number(value) for name, value in values.items()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._write(made, list(values))
        self._tokens, self._recompiled, self._since = 0, recompiled(), time.perf_counter()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return made

    def _measured(self) -> dict[str, float]:
        seconds = (time.perf_counter() - self._since) / self.every
        flops, exposed = self._costs()
        made = {"seconds": seconds}
        if self._tokens:
            made["tokens_per_second"] = self._tokens / (seconds * self.every)
        if flops is not None:
            made["mfu"] = flops / (seconds * self.peak)
        if exposed is not None:
            made["exposed_seconds"] = exposed
        new = recompiled() - self._recompiled
        return made | {"memory_bytes": float(memory(self.device)), "recompiles": float(max(0, new))}

    def _costs(self) -> tuple[float | None, float | None]:
        """FLOP and seconds of exposed communication of a step, given or estimated; None where they are unknown."""
        frames = latest(frames_of(self.model))
        flops = [n for f in frames if (n := flops_of(f)) is not None]
        exposed = [s.timeline.exposed for f in frames for s in f.stories.values() if s.timeline is not None]
        return (
            self.flops if self.flops is not None else sum(flops) * self.calls if flops else None,
            self.exposed if self.exposed is not None else sum(exposed) * self.calls if frames else None,
        )

    def _write(self, made: Mapping[str, float], others: Sequence[str]) -> None:
        for writer in self.to:
            if isinstance(writer, ScalarWriter):
                for name, value in made.items():
                    writer.add_scalar(name, value, self._steps)
            else:
                writer.log(dict(made), step=self._steps)
        if self.echo is not None:
            if not self._headed:
                self.echo(self.head())
            self._headed = True
            self.echo(line(self._steps, made, others))

    def head(self) -> str:
        """What the numbers of a line are computed from, in a line."""
        flops, exposed = self._costs()
        functions = len(latest(frames_of(self.model)))
        of = f"estimated from {functions} compiled function{'s' * (functions != 1)}"
        said = "given" if self.flops is not None else of
        parts = [
            "MFU: unknown, as nothing was compiled by the passes; give flops=" if flops is None else
            f"MFU: {flops:.3g} FLOP a step, {said}, of {self.peak:.3g} FLOP/s, {self._said}"
            + (f" in {str(self.dtype).removeprefix('torch.')}" if self._said == "measured" else ""),
            "exposed communication: unknown; give exposed=" if exposed is None else
            f"exposed communication: {'given' if self.exposed is not None else of}",
            "memory: the most that torch allocated on the GPU" if self.device == "cuda" else
            "memory: what of the process is in RAM",
        ]  # fmt: skip
        return f"rank {dist.get_rank() if dist.is_initialized() else 0}. " + ". ".join(parts)


def line(step: int, made: Mapping[str, float], others: Sequence[str] = ()) -> str:
    """The line of a step, of the values that are known."""
    parts = [_milliseconds(made["seconds"])]
    if "tokens_per_second" in made:
        parts.append(f"{made['tokens_per_second']:,.0f} tokens/s")
    if "mfu" in made:
        parts.append(f"MFU {made['mfu']:.1%}".replace("%", " %"))
    if "exposed_seconds" in made:
        parts.append(f"exposed {_milliseconds(made['exposed_seconds'])}")
    parts.append(f"memory {made['memory_bytes'] / 1e9:.2f} GB")
    parts.append(f"{made['recompiles']:.0f} recompile{'s' * (made['recompiles'] != 1)}")
    return f"step {step}: " + ", ".join([*parts, *[f"{name} {made[name]:.4g}" for name in others]])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def latest(frames: Sequence[Frame]) -> list[Frame]:
    """Of each function what was compiled last: of one that was trained, what has a backward."""
    found: dict[tuple[str, str, str], Frame] = {}
    for frame in frames:
        function = frame.file, frame.name, frame.compile_id.partition("/")[0]
        known = found.get(function)
        if known is None or "forward" in frame.stories or "forward" not in known.stories:
            found[function] = frame
    return list(found.values())


def flops_of(frame: Frame) -> float | None:
    """Floating-point operations of a call on this rank, with its backward; None if they are unknown."""
    known = {name: story.flops for name, story in frame.stories.items() if story.flops is not None}
    return known.get("joint", known.get("inference"))


def memory(device: str) -> int:
    """Bytes that this process holds: what torch allocated on the GPU at most since the last line, or what is in RAM."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no Linux; the most it ever was, in kilobytes or on macOS in bytes
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def measured_peak(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product of matrices, the best of some."""
    n = SIDE[device]
    generator = torch.Generator(device).manual_seed(0)  # the program's own numbers stay as they are
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best


__all__ = ["StepLog", "flops_of", "latest", "line", "measured_peak", "memory"]
