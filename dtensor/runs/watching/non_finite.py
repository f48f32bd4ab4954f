"""`Origins`: a dispatch mode that looks at what each operator of eager code returns, for the first NaN or infinity.

An operator is reported that returns a NaN and was given none; that its inputs held infinities, as masks do, is no
excuse. One that returns an infinity is reported if all inputs were finite, unless it is there to write one: if it was
given one as a number (`masked_fill(mask, -inf)`), or takes a logarithm. Collectives are not looked at, because what
they deliver was made on another rank, which reports it.

Operators on DTensors are seen twice: as they are called, for their global shapes, and as the local operators that they
consist of, whose inputs and results are looked at. In a backward, the node of autograd has the number that was current
when the operator ran forwards; under it the line of the user and the module are found.
"""

import linecache
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...job.job import job
from ...program.source_lines import is_users
from ...tensor.tensor import DTensor
from ...torch_private.core import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autograd_node,
    current_dispatch_mode,
    is_in_backward,
    next_sequence_number,
    schema,
    tree_leaves,
)
from .checksums import has_infinities, is_spoilt
from .replicas import WRAPPED

COMMUNICATE = ("dtensor", "_c10d_functional", "c10d", "c10d_functional")
"""Namespaces of operators that deliver what other ranks have made."""

UNWRITTEN = ("empty", "new_empty", "resize", "set_")
"""Parts of names of operators that return memory nobody has written to."""

LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy", "special_xlog1py", "logit", "special_logit")
"""Operators whose infinities are values of the function: the logarithm of a probability that is zero."""

KEPT = 1 << 17
"""Operators of a forward whose lines are kept for its backward."""


class Line(NamedTuple):
    """Where in the user's program an operator was called.

    Attributes:
        file: The file.
        line: Number of the line.
        module: Name of the module that ran, "" for the model itself; None outside of it.
    """

    file: str
    line: int
    module: str | None

    def __str__(self) -> str:
        at = f"{Path(self.file).name}:{self.line}"
        text = linecache.getline(self.file, self.line).strip()
        where = f"{at}: {text}" if text else at
        if self.module is None:
            return where
        return f"{self.module or 'the model'} ({where})"


class Origins(TorchDispatchMode):
    """The mode. It is on from `begin` to `end`, in the thread that calls `begin` and its backwards."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._hooks: list[Any] = []
        self._modules: list[str] = []
        self._outer: list[tuple[OpOverload, Any]] = []
        self._lines: dict[int, Line] = {}
        self._is_on = False

    def begin(self) -> None:
        """Start to look at operators."""
        for name, module in self._model.named_modules():
            self._hooks += _following(module, name.replace(WRAPPED, "").removesuffix("_orig_mod"), self._modules)
        self._is_on = True
        self.__enter__()

    def end(self) -> None:
        """Stop. Where another mode has begun since and has not ended, this one stays below it and does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.forget()
        if self._is_on and current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        self._is_on = False

    def forget(self) -> None:
        """Forget the lines of a forward, after its backward."""
        self._lines.clear()
        self._modules.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        self._remember()
        ours = next((t for t in types if issubclass(t, DTensor)), None)
        if ours is None:
            return self._local(func, args, kwargs)
        with self._within(func, (args, kwargs)):
            return ours.__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def _within(self, func: OpOverload, given: Any) -> Iterator[None]:
        """Context in which local operators are part of an operator on DTensors, and come here."""
        self._outer.append((func, given))
        try:
            with self:
                yield
        finally:
            self._outer.pop()

    def _local(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run an operator on plain tensors and look at what it returns."""
        if _is_unseen(func):
            return func(*args, **kwargs)
        # What an operator writes to is lost afterwards.
        before = _held((args, kwargs)) if schema(func).is_mutable else None
        out = func(*args, **kwargs)
        made = _held(out)
        if made:
            kind = _made(func, made, _held((args, kwargs)) if before is None else before, (args, kwargs))
            if kind:
                raise self._error(func, kind, (args, kwargs))
        return out

    def _remember(self) -> None:
        """Keep the line of an operator under the number of the node that autograd made for it, if it made one."""
        if torch.is_grad_enabled():
            if len(self._lines) >= KEPT:
                self._lines.clear()
            self._lines[next_sequence_number() - 1] = self._line()

    def _line(self) -> Line:
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return Line(frame.f_code.co_filename, frame.f_lineno, self._modules[-1] if self._modules else None)

    def _error(self, func: OpOverload, kind: str, given: Any) -> FloatingPointError:
        rank = dist.get_rank() if dist.is_initialized() else 0
        outer, shown = self._outer[0] if self._outer else (func, given)
        part = f", in its local operator {func}," if outer is not func else ""
        described = ", ".join(_described(x) for x in tree_leaves(shown) if isinstance(x, torch.Tensor))
        said = (
            f"{outer} of ({described}){part} made {kind} on rank {rank}, {self._where()}. "
            "None of its inputs had one; look there for a division by zero, the root or logarithm of a negative "
            "number, an overflow, or a row of a mask that leaves nothing"
        )
        here = job()
        if here is not None:
            here.failed(said)
        return FloatingPointError(said)

    def _where(self) -> str:
        """The line of the running operator; in a backward, that of the operator whose gradient it computes.

        A module that runs in a backward computes its forward again.
        """
        if not is_in_backward() or self._modules:
            return f"in {self._line()}"
        node = autograd_node()
        if node is None:
            return f"in a backward called in {self._line()}"
        line = self._lines.get(node.sequence_number, "an operator whose line is not known")
        return f"in the backward of {line}, node {node.name}"


def _following(module: nn.Module, name: str, running: list[str]) -> list[Any]:
    """Hooks that keep in `running` which modules run; their handles."""

    def enter(*_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        if running:
            running.pop()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]


def _name(func: OpOverload) -> str:
    return schema(func).name.partition("::")[2]


def _is_unseen(func: OpOverload) -> bool:
    """Whether what an operator returns was made elsewhere, or by nobody."""
    return func.is_view or func.namespace in COMMUNICATE or any(part in _name(func) for part in UNWRITTEN)


def _held(values: Any) -> str:
    """ "", "infinity" or "NaN": the worst among the elements of plain tensors."""
    tensors = [x for x in tree_leaves(values) if _is_readable(x)]
    if not any(is_spoilt([x], x.device) for x in tensors):
        return ""
    return "NaN" if any(x.isnan().any() for x in tensors) else "infinity"


def _is_readable(x: Any) -> bool:
    if not isinstance(x, torch.Tensor) or isinstance(x, (DTensor, FakeTensor)) or not has_infinities(x):
        return False
    return x.layout == torch.strided and not x.is_meta and x.numel() > 0


def _made(func: OpOverload, made: str, given: str, values: Any) -> str:
    """What an operator made that it was not given; "" for nothing that is worth an error."""
    numbers = [float(x) for x in tree_leaves(values) if isinstance(x, Number) and not isinstance(x, complex)]  # pyright: ignore
    if made == given or given == "NaN" or any(not math.isfinite(n) for n in numbers):
        return ""
    if made == "infinity" and (given or _name(func).rstrip("_") in LOGARITHMS):
        return ""
    return "a NaN" if made == "NaN" else "an infinity"


def _described(x: torch.Tensor) -> str:
    kind = str(x.dtype).removeprefix("torch.")
    placed = f" {''.join(map(str, x.placements))}" if isinstance(x, DTensor) else ""
    return f"{kind} {list(x.shape)}{placed}"


__all__ = ["Origins"]
