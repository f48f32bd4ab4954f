"""The recorder: a dispatch mode that writes a fingerprint of everything that operators compute on this rank.

    operator on global tensors -> run it -> fingerprints of its results, with their inputs and its place -> file

It sees the operators that the program calls: on DTensors the global operator, not the local ones it is carried out by,
but the redistributions that operands need (`comm.redistribute` reports them). Compiled graphs are recorded by `taps`.
Nothing is communicated and nothing is gathered; what a fingerprint costs is about what reading the tensor a few times
costs.

Which value an operator reads is known from a mark on the local tensor, and, where autograd made a new Python object for
the same memory, from that memory.
"""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.pending_tensor import Pending
from ...comm.redistribute import watchers
from ...errors import CallOrderError
from ...layout.layout import Layout
from ...mesh import provenance
from ...mesh.mesh import mesh_shape
from ...mesh.tensor_spec import Spec
from ...torch_private.core import OpOverload, TorchDispatchMode, tree_leaves
from ...torch_private.dynamo import forget_compiled
from . import fingerprint as fp
from .known import NOTHING, OTHER_ORDER, PLAIN, Known, Local, is_real, is_same, memory_of, opened
from .operator_kinds import EMPTY, NOT_RECORDED, SAME_VALUE, overwritten, short, written
from .places import CHECK, OPTIMIZER, Names, Place, Places
from .storage import RecordWriter, packed, path_of, refuse_earlier

MARK = "_dtensor_recorded"
"""The attribute of a local tensor that names the value it holds."""
PENDING = 512
"""The number of values after which fingerprints are written."""
REDISTRIBUTE = "dtensor::redistribute"


class Recorder(TorchDispatchMode):
    """Records what this thread runs, as a context. See `dtensor.record`."""

    def __init__(
        self, folder: str | os.PathLike[str], *, steps: int | None = None, values: str = "", waits: bool = False
    ) -> None:
        super().__init__()
        self.folder: Path = Path(folder)
        self.values = values
        self.steps = steps
        self.waits: bool = waits
        self.names: Names = Names()
        self.places: Places = Places(self.names)
        self.sites: dict[int, int] = {}
        self.inside: bool = False
        self.prefix = ""
        self.prefixes: dict[int, list[str]] = {}
        self.open: bool = False
        self.token: object = object()
        self.index: int = 0
        self.step_number: int = 0
        self.thread: int = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo compile while the mode is active."""
        return True

    def __enter__(self) -> "Recorder":
        if self.open:
            raise CallOrderError("this recorder is in use; make another one with dtensor.record(folder)")
        if not self.waits:
            refuse_earlier(self.folder, path_of, *rank_and_world())
        self.index = self.step_number = self._last = 0
        self._specs: dict[Any, int] = {}
        self._meshes: dict[int, Any] = {}
        self._memory: dict[tuple[Any, ...], tuple[StorageWeakRef, Known]] = {}
        self._pending: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._writer: RecordWriter | None = None
        self.thread = threading.get_ident()
        _begin(self)
        self.open = True
        forget_compiled()
        return super().__enter__()

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        _end(self)
        self.close(given[1] if len(given) > 1 else None)
        self._memory.clear()
        forget_compiled()

    @property
    def writer(self) -> RecordWriter:
        """The file of this rank, begun when the first value is known, by when the program knows its rank."""
        if self._writer is None:
            rank, world = rank_and_world()
            refuse_earlier(self.folder, path_of, rank, world)
            header = {"rank": rank, "world": world, "torch": torch.__version__, "program": sys.argv}
            self._writer = RecordWriter(self.folder, rank, header)
        return self._writer

    @property
    def is_on(self) -> bool:
        """Whether values are recorded now."""
        return self.open and not self.inside and not (self._writer is not None and self._writer.broken)

    def step(self) -> None:
        """Begin the next step. The end of an optimizer's step does so, too."""
        if self.waits:
            return
        self.step_number += 1
        self.inside = False
        self.prefixes.clear()
        self.places.forward.clear()
        self._memory = {where: held for where, held in self._memory.items() if not held[0].expired()}
        self.flush()
        if self.steps is not None and self.step_number >= self.steps:
            self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Write what is left and the end of the file, with the error that ended the program, if any. What runs
        afterwards is not recorded."""
        if self.open and self.waits:
            self.open = False  # nothing was recorded, and another process may be the one that does
        if self.open:
            self.flush()
            failed = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
            self.writer.close({"steps": self._last + 1, "values": self.index, "failed": failed})
            self.open = False

    def flush(self) -> None:
        """Write the fingerprints that are still on their device."""
        if not self._pending:
            return
        with disabled_recording(self):
            on_host = torch.cat([f.cpu() for _, f in self._pending]).numpy()
        cuts = np.cumsum([f.numel() for _, f in self._pending])[:-1]
        lines = [line for line, _ in self._pending]
        for line, vector in zip(lines, np.split(on_host, cuts)):
            line["f"] = packed(vector)
        self._pending.clear()
        self.writer.write(*lines)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._records(func, args, kwargs):
            return func(*args, **kwargs)
        place = self.places.here()
        if place.phase == CHECK:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in EMPTY:
            out = func(*args, **kwargs)
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and is_real(x):
                    self._mark(x, NOTHING)
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        targets = overwritten(func, args, kwargs)
        inputs = [-1 if id(x) in targets else self.known(x, place, name, k) for k, x in enumerate(given)]
        out = func(*args, **kwargs)
        self._computed(func, name, place, given, inputs, out, args, kwargs)
        return out

    def _records(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not self.is_on or not isinstance(func, OpOverload):
            return False
        if self.waits and not self.places.in_module():
            return False
        self.waits = False
        return func._schema.name not in NOT_RECORDED and not any(
            not is_real(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        )

    def _computed(
        self,
        func: OpOverload,
        name: str,
        place: Place,
        given: Sequence[torch.Tensor],
        inputs: Sequence[int],
        out: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)] or written(func, args, kwargs)
        if made and (func.is_view or name in SAME_VALUE):
            for x in made:
                self._viewed(x, given[0] if given else x, inputs[0] if inputs else NOTHING, name in SAME_VALUE)
            return
        if name == REDISTRIBUTE:  # `redistributed` was called
            for x in made:
                found = self._lookup(x)
                if found is None:
                    self._viewed(x, given[0], inputs[0], True)
                else:
                    self._mark(x, found.index, found.owner, found.shape)
            return
        with torch.no_grad():
            lists = place.phase == OPTIMIZER and len(made) > 1 and len(inputs) % len(made) == 0
            for k, x in enumerate(made):
                if is_real(x):
                    each = inputs[k :: len(made)] if lists else inputs
                    owner = (
                        self._owner(x, given[k :: len(made)] if lists else given) if place.phase == OPTIMIZER else ""
                    )
                    number = 0 if lists else k
                    self.value(
                        x, place.phase, owner or place.module, place.line, short(name), number,
                        list(dict.fromkeys(each)), owner=owner,
                    )  # fmt: skip

    def _owner(self, x: torch.Tensor, given: Sequence[torch.Tensor]) -> str:
        """The name of the parameter that an optimizer works on: that of the first tensor that has one."""
        for tensor in (x, *given):
            found = self._lookup(tensor)
            owner = self._name(tensor) or (found.owner if found is not None else "")
            if owner:
                return owner
        return ""

    def known(self, x: Any, place: Place, reader: str, k: int) -> int:
        """The number of the value that `x` holds. One that no recorded operator made is recorded now, as an input."""
        found = self._lookup(x)
        _, spec = opened(x)
        if found is not None and (found.index == NOTHING or is_same(found.spec, spec)):
            return found.index
        if found is not None:
            return self.value(x, place.phase, place.module, place.line, "from_local", 0, [found.index], kind="from")
        name = self._name(x)
        if name:
            return self.value(x, "parameter", name, "", "parameter", 0, [], kind="parameter")
        return self.value(x, place.phase, place.module, place.line, "input", 0, [], kind="input")

    def value(
        self,
        x: Any,
        phase: str,
        module: str,
        line: str,
        op: str,
        k: int,
        inputs: Sequence[int],
        *,
        kind: str = "op",
        owner: str = "",
        more: dict[str, Any] | None = None,
    ) -> int:
        """Record a value: a fingerprint of this rank's part, and what is known of it. Returns its number."""
        local, spec = opened(x)
        shape, offsets, written = tuple(local.shape), (0,) * local.dim(), None
        if spec is not None and spec.coordinate is not None:
            box = spec.layout.local_box(spec.shape, mesh_shape(spec.mesh), spec.coordinate)
            if tuple([b - a for a, b in box]) == shape:
                shape, offsets, written = tuple(spec.shape), tuple([a for a, _ in box]), self._spec(spec)
        index = self.index
        self.index, self._last = index + 1, self.step_number
        described = {
            "i": index,
            "s": self.step_number,
            "p": phase,
            "m": module,
            "l": line,
            "o": op,
            "n": k,
            "in": [i for i in inputs if i != NOTHING],
            "d": str(local.dtype).removeprefix("torch."),
            "g": shape,
            "b": written,
            "k": kind,
            **(more or {}),
        }
        if not local.is_floating_point() and not local.is_complex():
            described["e"] = 1
        if self.values and fnmatch(f"{phase}/{module}/{op}", self.values):
            described["v"] = self._keep(local, index)
        self._pending.append((described, fp.fingerprint(local, shape, offsets)))
        self._mark(x, index, owner)
        if len(self._pending) >= PENDING:
            self.flush()
        return index

    def at(self, phase: str, module: str, line: str) -> Place:
        """The place of a value of the compiled graph that runs now."""
        return Place(phase, ".".join([part for part in (self.prefix, module) if part]), line)

    def wrapped(self, local: torch.Tensor, spec: Spec) -> Any:
        """A local tensor with its spec, to be recorded."""
        return Local(local, spec)

    def _keep(self, local: torch.Tensor, index: int) -> str:
        name = f"{self.writer.path.stem}.{index}.npy"
        kept = local.detach()
        kept = kept.to(torch.float32) if kept.dtype in (torch.bfloat16, torch.float16) else kept
        try:
            np.save(self.folder / name, kept.cpu().resolve_conj().resolve_neg().numpy())
        except OSError:
            return ""
        return name

    def _viewed(self, x: torch.Tensor, base: torch.Tensor, index: int, same: bool) -> None:
        """A view holds the value of its base, in the same order of elements or another."""
        found = self._lookup(base)
        shape = tuple(base.shape) if found is None else found.shape
        self._mark(x, index, "" if found is None else found.owner, shape if same else OTHER_ORDER)

    def _mark(self, x: torch.Tensor, index: int, owner: str = "", shape: tuple[int, ...] | None = None) -> None:
        local, spec = opened(x)
        if shape is None:
            shape = tuple(local.shape if spec is None else spec.shape)
        known = Known(self.token, index, spec, shape, owner)
        setattr(local, MARK, known)
        self._memory[memory_of(local)] = StorageWeakRef(local.untyped_storage()), known

    def _lookup(self, x: Any) -> Known | None:
        local, _ = opened(x)
        found = getattr(local, MARK, None)
        if found is None or found.token is not self.token:
            storage, found = self._memory.get(memory_of(local), (None, None))
            if storage is None or storage.expired():
                return None
        return found

    def _name(self, x: torch.Tensor) -> str:
        return self.names.tensors.get(id(x), "") or self.names.tensors.get(id(opened(x)[0]), "")

    def _spec(self, spec: Spec) -> int:
        """The number of a spec in the file, where it is written the first time."""
        key = (id(spec.mesh), spec.layout, tuple(spec.shape))
        found = self._specs.get(key)
        if found is None:
            found = self._specs[key] = len(self._specs)
            if id(spec.mesh) not in self._meshes:
                self._meshes[id(spec.mesh)] = spec.mesh  # kept, so that no other mesh gets its id
                names = list(spec.mesh.mesh_dim_names or [f"axis{a}" for a in range(spec.mesh.ndim)])
                described = {"mesh": id(spec.mesh), "names": names, "ranks": spec.mesh.mesh.tolist()}
                self.writer.write(described)
            layout: Layout = spec.layout
            self.writer.write(
                {
                    "spec": found,
                    "on": id(spec.mesh),
                    "dims": layout.dims,
                    "partial": layout.partial,
                    "text": layout.text,
                    "shape": list(spec.shape),
                }
            )
        return found

    def redistributed(self, local: torch.Tensor, spec: Spec, dst: Layout, result: Any) -> None:
        """Record a redistribution that `redistribute_local` carried out."""
        if not self.is_on or self.waits or type(local) not in PLAIN:
            return
        if type(result) is Pending:
            result = result.wait()
        if result is local:
            return
        with torch.no_grad():
            place = self.places.here()
            if place.phase == CHECK:
                return
            before = Local(local, spec)
            known = self.known(before, place, "redistribute", 0)
            found = self._lookup(before)
            if found is not None and found.shape != tuple(spec.shape):
                known = self.value(before, place.phase, place.module, place.line, "view", 0, [known], kind="view")
            after = Local(result, spec.with_layout(dst))
            op = f"redistribute {spec.layout.text}->{dst.text}"
            self.value(after, place.phase, place.module, place.line, op, 0, [known], kind="move")

    @torch.no_grad()
    def each_parameter(self, optimizer: Any, what: str) -> None:
        """Record the gradients of an optimizer's parameters ("gradient"), or the parameters ("updated")."""
        if not self.is_on or self.waits:
            return
        with disabled_recording(self):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    x = p.grad if what == "gradient" else p
                    if x is None or not is_real(x):
                        continue
                    found = self._lookup(x)
                    inputs = [found.index] if found is not None else []
                    name = self._name(p)
                    self.value(x, what, name, "", what, 0, inputs, kind=what, owner=name)


@contextmanager
def disabled_recording(recorder: Recorder) -> Iterator[None]:
    """A context in which operators are not recorded."""
    before, recorder.inside = recorder.inside, True
    try:
        yield
    finally:
        recorder.inside = before


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as far as they are known by now."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


_recorders: dict[int, Recorder] = {}
_lock = threading.Lock()
_hooked: list[Any] = []


def recorder() -> Recorder | None:
    """The recorder of this thread; in a thread of autograd, that of the process."""
    found = _recorders.get(threading.get_ident())
    if found is None and len(_recorders) == 1 and threading.current_thread() is not threading.main_thread():
        (found,) = _recorders.values()
    return found


def _begin(new: Recorder) -> None:
    with _lock:
        if not _hooked:
            # Left in place: recorders of other threads iterate over them.
            _hooked.append(register_optimizer_step_pre_hook(_before_optimizer))
            _hooked.append(register_optimizer_step_post_hook(_after_optimizer))
        if not _recorders:
            watchers.append(_redistributed)
            provenance.keep_specs(True)
        _recorders[new.thread] = new


def _end(old: Recorder) -> None:
    with _lock:
        _recorders.pop(old.thread, None)
        if not _recorders:
            watchers.remove(_redistributed)
            provenance.keep_specs(False)


def _after_fork() -> None:
    """A process that was forked, such as one that loads data, records nothing into the files of its parent."""
    for each in _recorders.values():
        each.open = False
    _recorders.clear()


os.register_at_fork(after_in_child=_after_fork)


def _before_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _recorders and (here := recorder()) is not None:  # the first is all that Dynamo has to read otherwise
        here.each_parameter(optimizer, "gradient")


def _after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _recorders and (here := recorder()) is not None:
        here.each_parameter(optimizer, "updated")
        here.step()


def _redistributed(local: torch.Tensor, spec: Spec, dst: Layout, result: Any) -> None:
    if (here := recorder()) is not None:
        here.redistributed(local, spec, dst, result)


def is_recording() -> bool:
    """Whether something is recorded in this process."""
    return bool(_recorders)


__all__ = ["Recorder", "is_recording", "rank_and_world", "recorder"]
