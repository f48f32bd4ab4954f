"""Where in the program an operator is called: the path of the module, the line of the user's code, and the phase.

All three are read off Python's stack, so nothing has to be installed in the modules, and Dynamo traces what it would
trace without. In a backward the stack does not show them; there an operator belongs to the forward operator whose
gradient it computes, which has the same sequence number.
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx import GraphModule

from ...program.source_lines import is_users, takes_steps
from ...torch_private.core import MODULE_CALL, autograd_node, next_sequence_number

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, CHECK = "forward", "backward", "recompute", "optimizer", "check"

_CHECKPOINT = torch.utils.checkpoint.__file__
_LIBRARY = Path(__file__).parent.parent.parent
_CHECKS = {
    str(_LIBRARY / file)
    for file in (
        "comm/replication_check.py",
        "parallel/checks/input_check.py",
        "parallel/checks/rank_variance.py",
        "runs/watching/checksums.py",
        "runs/watching/differences.py",
        "runs/watching/replicas.py",
        "runs/watching/watch.py",
    )
}
"""Files of this library whose operators only look at values of the program."""
_OTHER, _USERS, _CALL, _OPTIMIZER, _CHECK, _AGAIN = range(6)
_kinds: dict[CodeType, int] = {MODULE_CALL: _CALL}


@dataclass(frozen=True)
class Place:
    """Where an operator is called.

    Attributes:
        phase: "forward", "backward", "recompute" (a forward repeated in a backward), "optimizer", or
            "check": this library only looks at values.
        module: path of the innermost module, such as "layers.0.mlp"; "" for the model itself, or outside of modules.
        line: file and number of the innermost line of the user's code; "" if there is none.
    """

    phase: str
    module: str
    line: str


NOWHERE = Place(FORWARD, "", "")
NO_PART = Place(CHECK, "", "")


@dataclass
class Names:
    """The paths of modules and the names of parameters and buffers, learned as models are called."""

    modules: WeakKeyDictionary[nn.Module, str] = field(default_factory=WeakKeyDictionary)
    tensors: dict[int, str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    roots: int = 0

    def learn(self, root: nn.Module) -> None:
        """Name everything in `root`; with the class in front unless it is the first model."""
        prefix = "" if self.roots == 0 else type(root).__name__
        self.roots += 1
        for path, module in root.named_modules():
            self.modules.setdefault(module, _joined(prefix, path))
        for path, tensor in [*root.named_parameters(), *root.named_buffers()]:
            name = _joined(prefix, path)
            self.kept.append(tensor)
            self.tensors.setdefault(id(tensor), name)
            local = getattr(tensor, "_local_tensor", None)
            if local is not None:
                self.tensors.setdefault(id(local), name)

    def path(self, module: nn.Module, outermost: FrameType | None) -> str:
        """The path of a module, whose call is inside the call of `outermost`, if that is known."""
        found = self.modules.get(module)
        if found is None and outermost is not None:
            self.learn(outermost.f_locals["self"])
        if found is None:
            found = self.modules.setdefault(module, type(module).__name__)
        return found


def _joined(prefix: str, path: str) -> str:
    path = ".".join([part for part in path.split(".") if part != "_orig_mod"])
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _kind(code: CodeType) -> int:
    file = code.co_filename
    found = _OPTIMIZER if takes_steps(file) else _USERS if is_users(file) else _OTHER
    found = _CHECK if file in _CHECKS else _AGAIN if file == _CHECKPOINT else found
    _kinds[code] = found
    return found


class Places:
    """Tells the place of the operator that is called now."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.forward: dict[int, Place] = {}

    def here(self) -> Place:
        """The place of the operator whose call is on the stack."""
        node = autograd_node()
        line, module, outermost, phase = _stack(sys._getframe(1))
        if phase == CHECK:
            return NO_PART
        if node is not None and module is None and phase != RECOMPUTE:
            made = self.forward.get(node.sequence_number, NOWHERE)
            return Place(BACKWARD, made.module, made.line)
        path = "" if module is None else self.names.path(module, outermost)
        phase = FORWARD if phase == RECOMPUTE else phase
        place = Place(phase if node is None else RECOMPUTE, path, line)
        if torch.is_grad_enabled() or node is None:
            self.forward.setdefault(next_sequence_number() - 1, place)
        return place

    def in_module(self) -> bool:
        """Whether the call of a module is on the stack."""
        return _stack(sys._getframe(1))[1] is not None

    def module(self) -> str:
        """The path of the innermost module whose call is on the stack."""
        _, module, outermost, _ = _stack(sys._getframe(1))
        return "" if module is None else self.names.path(module, outermost)


def _stack(frame: FrameType | None) -> tuple[str, nn.Module | None, FrameType | None, str]:
    """The innermost line of the user's code, the innermost module, the frame of the outermost one, and the phase."""
    line, module, outermost, phase = "", None, None, FORWARD
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        if kind is None:
            kind = _kind(code)
        if kind == _USERS:
            line = line or f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        elif kind == _CALL:
            called = frame.f_locals["self"]
            if not isinstance(called, GraphModule):
                module = called if module is None else module
                outermost = frame
        elif kind == _OPTIMIZER:
            phase = phase if phase == CHECK else OPTIMIZER
        elif kind == _CHECK:
            phase = CHECK
        elif kind == _AGAIN:
            phase = RECOMPUTE if phase == FORWARD else phase
            module = _checkpointed(frame) if module is None else module
        frame = frame.f_back
    return line, module, outermost, phase


def _checkpointed(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame of torch's checkpoints calls, of which no call is on the stack."""
    seen = frame.f_locals
    called = getattr(seen.get("fn") or getattr(seen.get("ctx"), "run_function", None), "__self__", None)
    return called if isinstance(called, nn.Module) else None


__all__ = ["BACKWARD", "CHECK", "FORWARD", "NOWHERE", "OPTIMIZER", "RECOMPUTE", "Names", "Place", "Places"]
