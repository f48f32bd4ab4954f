"""`watch`: compares, while a model is trained, what its ranks should hold alike, and finds NaNs.

A rank sums what it holds to a few numbers for each set of ranks that should hold the same (`fingerprints`), and one
all-gather of these numbers, whose length does not depend on the model, brings them together. All ranks decide by the
same numbers. Only where something differs is anything else exchanged (`differences`).

The numbers of a rank, as int64: checksum of what it holds without values; number of steps; whether NaNs or infinities
were found; then for each set of ranks a checksum of the set and two of the values.
"""

import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ...errors import ArgumentError, ArgumentTypeError, ReplicaError, shown
from ...job.job import failure_told, job
from ...torch_private.core import disable_current_modes
from .checksums import checksum, is_spoilt
from .differences import Search, spoilt_text
from .non_finite import Origins
from .replicas import GRADIENT, Holding, Holdings, Scope, digest

SETS = 32
"""Sets of ranks that the numbers of a rank have room for; where a model has more, the room is a multiple."""


def watch(
    model: nn.Module,
    *optimizers: Optimizer | Iterable[Optimizer],
    every: int = 100,
    on_difference: Literal["raise", "warn"] = "raise",
    nan: bool = False,
    skip: str | Sequence[str] = (),
    rng: bool | None = None,
    mesh: DeviceMesh | None = None,
) -> "Watch":
    """Compares, while a model is trained, what ranks should hold alike: parameters, optimizer state, generators.

    The ranks compare now, and then after every `every`-th step of the first optimizer, in one all-gather of a kilobyte.
    Where something differs, all of them raise the same `ReplicaError`, which names the tensor, the ranks, the step, and
    the largest difference. It is found within `every` steps: bits that flipped on one rank, gradients that were not
    summed, seeds that differ. NaNs and infinities in parameters, gradients and optimizer state are a
    `FloatingPointError`, also on all ranks.

    What should be alike follows from placements: DTensors along the mesh axes over which they are replicated, plain
    parameters, buffers, and options such as the learning rate on all ranks. Of a fully sharded parameter no other rank
    has the same part, so that only NaNs are looked for. Generators are compared among ranks whose DTensors share a
    mesh, except along the data axes of `fully_shard`. Running statistics of batch norms, which each rank takes of its
    own batch, are not compared, unless they are those of `nn.SyncBatchNorm`.

    Every rank makes this call, after model and optimizers are made and, if they are, loaded. Models and optimizer steps
    may be compiled.

    Args:
        model: The model, sharded or not.
        optimizers: Its optimizers, or lists of them. Without any, call `check` between the steps.
        every: Number of steps from one comparison to the next.
        on_difference: "raise", or "warn" to only warn and go on.
        nan: Whether to also look at each operator, and raise a `FloatingPointError` at the first that makes a NaN out
            of numbers, or an infinity out of finite numbers. That takes several times as long, and compiled functions
            run uncompiled.
        skip: Names of parameters and buffers that may differ, as patterns with the wildcards of `fnmatch`; their
            optimizer states and gradients are left out, too.
        rng: Whether generators are compared, then on all ranks; None compares those that DTensors draw from.
        mesh: The mesh whose ranks hold the model, such as that of a pipeline stage. DTensors on slices of it are also
            compared along its other axes. None takes all ranks, and of a DTensor its own mesh.

    Returns:
        The `Watch`, a context manager that ends with its block; `close` ends it otherwise.

    Raises:
        ReplicaError: Ranks hold something different, or different sets of tensors.
        FloatingPointError: A parameter or an optimizer state is not finite.
        ValueError: `every` is not a positive int, `on_difference` is neither word, or a pattern matches no name.
        TypeError: An argument has the wrong type.
        MeshError: This rank is not in `mesh`, or there is no process group over its ranks.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"watch takes an nn.Module and its optimizers; got {shown(model)}, write watch(model, optimizer)"
        )
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        raise ArgumentError(f"every is the number of steps between comparisons, an int of at least 1; got {every!r}")
    if on_difference not in ("raise", "warn"):
        raise ArgumentError(f"on_difference is 'raise' or 'warn'; got {on_difference!r}")
    if rng not in (None, True, False) or nan not in (True, False):
        raise ArgumentTypeError(f"nan is True or False, and rng one of them or None; got nan={nan!r}, rng={rng!r}")
    job()  # from here on each rank knows whether the others are alive
    scope = Scope(mesh)
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    holdings = Holdings(model, _flat(optimizers), scope, patterns, rng)
    holdings.check_patterns()
    return Watch(holdings, scope, int(every), on_difference == "raise", Origins(model) if nan else None)


def _flat(given: Sequence[Any]) -> list[Optimizer]:
    found = [o for item in given for o in (item if isinstance(item, (list, tuple)) else [item])]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"watch takes the optimizers of the model after it; got {type(optimizer).__name__}; every, skip and "
                "the like are given by their names"
            )
    return found


class Watch:
    """A running comparison, made by `watch`.

    Attributes:
        steps: Number of steps of the first optimizer that it has seen. Set it after a checkpoint is loaded, so that
            messages name the step of the whole training.
    """

    def __init__(self, holdings: Holdings, scope: Scope, every: int, raises: bool, origins: Origins | None) -> None:
        self._holdings, self._scope, self._every, self._raises = holdings, scope, every, raises
        self._origins = origins
        self._hooks: list[Any] = []
        self.steps: int = 0
        self.check()
        if holdings.optimizers:
            after: Any = torch.compiler.disable(self._after_step)
            self._hooks.append(holdings.optimizers[0].register_step_post_hook(after))
        if origins is not None:
            origins.begin()

    def check(self) -> None:
        """Compare now. Every rank makes this call.

        Raises:
            ReplicaError: Ranks hold something different. With `on_difference="warn"` it is a warning.
            FloatingPointError: A parameter, gradient or optimizer state is not finite. With "warn" it is a warning.
        """
        with torch.no_grad(), disable_current_modes():
            error = self._compared()
        if error is not None:
            if self._raises:
                raise error
            warnings.warn(str(error), stacklevel=2)

    def close(self) -> None:
        """End the comparison: all hooks are removed. Further calls do nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._origins is not None:
            self._origins.end()
            self._origins = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self._origins is not None:
            self._origins.forget()
        if self.steps % self._every == 0:
            self.check()

    def _compared(self) -> Exception | None:
        """The error to raise on all ranks, or None."""
        with failure_told("compared replicas"):
            held = self._holdings.all()
            devices = {h.value.device for h in held if h.value.device.type != "cpu"}
            device = self._scope.device(min(devices, key=str, default=torch.device("cpu")))
            mine = self._numbers(held, device)
        rows = self._scope.gather(mine).cpu().tolist()
        search = Search(self._scope, held, device, self.steps)
        structures, steps, spoilt, *_ = zip(*rows)
        if len(set(structures)) > 1:
            return search.different_lists()
        if len(set(steps)) > 1:
            return search.different_steps(steps)
        text = spoilt_text(search) if any(spoilt) else ""
        if _differ([row[3:] for row in rows]):
            error = search.different_values()
            return ReplicaError(f"{error}. Moreover, {text}") if text else error
        return FloatingPointError(text) if text else None

    def _numbers(self, held: Sequence[Holding], device: torch.device) -> torch.Tensor:
        """The numbers of this rank, as the module's docstring describes them."""
        sets: dict[Any, list[Holding]] = {}
        for h in held:
            if h.place.kind is not None:
                sets.setdefault(h.place.kind, []).append(h)
        structure = digest("\n".join(h.text for h in held if h.role != GRADIENT))
        bad = is_spoilt([h.local for h in held if h.is_counted], device)
        found = [torch.tensor([structure, self.steps], device=device), bad[None]]
        for alike in sets.values():
            ranks = torch.tensor([digest(str(alike[0].place.ranks))], device=device)
            found += [ranks, checksum([h.local for h in alike if h.is_compared], device)]
        room = -(-max(len(sets), 1) // SETS) * SETS
        return nn.functional.pad(torch.cat(found), (0, 3 * (room - len(sets))))


def _differ(rows: Sequence[Sequence[int]]) -> bool:
    """Whether two ranks that should hold the same do not, by the numbers of all ranks for each set of ranks."""
    for i in range(0, len(rows[0]), 3):
        by_ranks: dict[int, set[tuple[int, ...]]] = {}
        for row in rows:
            by_ranks.setdefault(row[i], set()).add(tuple(row[i + 1 : i + 3]))
        if any(len(found) > 1 for found in by_ranks.values()):
            return True
    return False


__all__ = ["Watch", "watch"]
