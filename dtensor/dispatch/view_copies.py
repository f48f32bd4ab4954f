"""Keeps views that are really copies consistent with their base, as if they shared memory.

A view of a DTensor shares its local tensor's memory, unless its operands had to be redistributed, or the shard has no
such view. The result is then a copy. How it was made is recorded, so that the copy can follow its base:

    write to a copy     the base is updated at once: gathered, viewed, written to and sharded again
    write to any        the version that base and copies share is bumped: every copy but the written one becomes stale
    read of a copy      a stale copy is made again from its base, in place, after its base if that is a stale copy too

These records are kept on the storages of the local tensors. So they apply to every DTensor that shares memory with a
base or a copy, whether by `detach`, by `.data`, or as a view made before the copy. Whether a copy is stale depends only
on the order of operators, which is the same on all ranks. A copy that only some ranks have, because their shard has no
such view, is made again without communication.

If a compiled function returned a copy, only its graph knew how it was made. `lose` then records what it is a view of,
and it is an error to write to the copy, or to read it once it is stale.

Writes to a local tensor by plain torch, through `to_local` or the tensor passed to `from_local`, do not bump the
version, so copies do not see them.
"""

import weakref
from typing import Any

import torch

from ..comm.pending_tensor import Pending, waited
from ..comm.redistribute import redistribute_local
from ..errors import OperatorError, ShardingError
from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..torch_private.core import (
    FakeTensor,
    OpOverload,
    below_autograd,
    functionalized,
    graph_node,
    is_alias_of,
    keep_while_traced,
)

ATTRIBUTE = "dtensor_memory"
"""Attribute of the storage of a base or a copy: its `_Memory`."""

copies: set[int] = set()
"""One entry for each live copy. While it is empty, no operand has to be checked."""

make: Any
"""Makes a DTensor from a local tensor and a spec; set by `install`."""


def install(wrap: Any) -> None:
    """Set the function that makes a DTensor from a local tensor and a spec."""
    global make
    make = wrap


class _Family:
    """Shared by a base and its copies; `version` counts the writes to any of them."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0


class _Memory:
    """The record kept on one storage.

    Attributes:
        family: shared with the base and the other copies.
        origin: how the storage was made if it is a copy; None for a base.
        seen: the family's version when the copy was made or updated.
        counted: autograd's version of the copy, which it shares with its base. Compiled functions write without
            dispatch and bump only this version.
    """

    __slots__ = ("counted", "family", "origin", "seen")

    def __init__(self, family: _Family, origin: "_Origin | _Lost | None" = None, counted: int = 0) -> None:
        self.family, self.origin, self.seen, self.counted = family, origin, family.version, counted

    @property
    def stale(self) -> bool:
        return self.origin is not None and (self.seen != self.family.version or self.origin.changed)

    def of_family(self, local: torch.Tensor) -> bool:
        """Whether another local tensor belongs to the memory of a base or copy of the same family."""
        other = _memory(local)
        return other is not None and other.family is self.family


class _Origin:
    """How a copy was made: as results of `func(base, *args, **kwargs)`, of which several may share one storage.

    Attributes:
        base, spec: the local tensor of the base, and its spec.
        moved: whether operands were redistributed; a copy made without that may exist on this rank only.
        parts: for each result its index (None for an operator with a single result), its spec, its place in the
            storage, and a weak reference to its local tensor; a strong one would be a cycle through the storage.
    """

    __slots__ = ("args", "base", "func", "kwargs", "moved", "parts", "spec")
    changed = False

    def __init__(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        base: torch.Tensor,
        spec: Spec,
        moved: bool,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.base, self.spec, self.moved = base, spec, moved
        self.parts: list[tuple[int | None, Spec, tuple[Any, ...], weakref.ref]] = []
        copies.add(id(self))

    def __del__(self) -> None:
        copies.discard(id(self))

    def of(self, base: Any) -> list[Any]:
        """The view of `base`, a DTensor or plain tensor, for each part."""
        made = self.func(base, *self.args, **self.kwargs)
        return [made if index is None else made[index] for index, *_ in self.parts]

    def own(self, local: torch.Tensor) -> list[tuple[torch.Tensor, Spec]]:
        """Local tensor and spec of each part; `local` may be any tensor in the copy's storage."""
        found = []
        for _, spec, place, made in self.parts:
            known = made()
            found.append((_at(local, spec.dtype, place) if known is None else known, spec))
        return found


class _Lost:
    """The origin of a copy that a compiled function returned: it records the bases, but not how the copy was made.

    Attributes:
        shape: shape of the copy.
        bases: (weak reference, autograd's version at the time) of each DTensor that the copy is a view of and that the
            program holds.
    """

    __slots__ = ("bases", "shape")

    def __init__(self, shape: torch.Size, bases: list[Any]) -> None:
        self.shape, self.bases = shape, [(weakref.ref(x), _version(x)) for x in bases]
        copies.add(id(self))

    def __del__(self) -> None:
        copies.discard(id(self))

    @property
    def changed(self) -> bool:
        """Whether a base was written to by anything that bumps autograd's version."""
        return any((x := base()) is not None and _version(x) != before for base, before in self.bases)


def root(x: Any) -> tuple[int, bool]:
    """An id of the memory that `x` would use on a single device, and whether `x` is a copy of it."""
    local, is_copy = x._local_tensor, False
    while (memory := _memory(local)) is not None and isinstance(memory.origin, _Origin):
        local, is_copy = memory.origin.base, True
    return local.untyped_storage()._cdata, is_copy


def lose(made: list[Any], bases: list[Any]) -> None:
    """Record that the DTensors `made`, which a compiled function returned, are copies.

    On a single device they would share memory with each other and with `bases`.
    """
    family = _memory_or_new(bases[0]._local_tensor).family if bases else _Family()
    for x in bases[1:]:
        _memory_or_new(x._local_tensor).family = family
    for x in made:
        storage = waited(x._local_tensor).untyped_storage()
        if getattr(storage, ATTRIBUTE, None) is None:
            setattr(storage, ATTRIBUTE, _Memory(family, _Lost(x.shape, bases), _version(x)))


def remember(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, moved: bool, taken_apart: bool
) -> None:
    """Record how the results of the view operator `func` were made, for those that are copies.

    Args:
        moved: whether the base was redistributed.
        taken_apart: whether `func` was run as other operators; the views among them have recorded it already.
    """
    base, many = args[0], isinstance(out, (list, tuple))
    # Nearly all views meet the last condition.
    if base._spec.coordinate is None or (
        not many and not moved and is_alias_of(waited(base._local_tensor), out._local_tensor)
    ):
        return
    mine: list[_Memory] = []
    for index, made in enumerate(out if many else (out,)):
        if made is base:
            return
        source = waited(base._local_tensor)
        if is_alias_of(source, made._local_tensor):
            if not moved:
                continue
            # Its base was redistributed, so all ranks treat it as a copy: make it one.
            made._local_tensor = made._local_tensor.clone()
        storage = made._local_tensor.untyped_storage()
        memory = getattr(storage, ATTRIBUTE, None)
        if memory is None or (memory.origin is None and memory not in mine):
            origin = _Origin(func, tuple(args[1:]), kwargs, source, base._spec, moved or taken_apart)
            memory = _Memory(_memory_or_new(source).family, origin, _version(base))
            setattr(storage, ATTRIBUTE, memory)
            mine.append(memory)
        if memory in mine and isinstance(memory.origin, _Origin):
            part = made._local_tensor
            keep_while_traced(part)
            memory.origin.parts.append((index if many else None, made._spec, _place(part), weakref.ref(part)))


def freshen(written: tuple[int, ...], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Update stale copies among the operands of a call, before it runs and writes to those at `written`.

    Raises:
        OperatorError: the call would write to a copy in which several elements stand for one element of its base, or
            to a copy that a compiled function returned.
        ShardingError: an operand is a stale copy that a compiled function returned.
    """
    operands = list(_dtensors((args, kwargs)))
    for x in operands:
        fresh(x)
    for i in written:
        _check_writable(func, operands[i])


def fresh(x: Any) -> Any:
    """Return the DTensor `x`, updated in place if it is a stale copy."""
    memory = _memory(x._local_tensor)
    if memory is None or memory.origin is None:
        return x
    version = _version(x)
    if memory.stale or memory.counted != version:
        with below_autograd(), functionalized(x._local_tensor):
            _refresh(memory, x._local_tensor, memory.counted != version)
        memory.counted = version
    return x


def wrote(written: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handle a write to the operands at `written`: update the bases of copies, and mark other copies as stale."""
    operands = list(_dtensors((args, kwargs)))
    for i in written:
        local = operands[i]._local_tensor
        if isinstance(local, FakeTensor):
            _check_input(local)
        memory = _memory(local)
        if memory is None:
            continue
        memory.family.version += 1
        memory.counted = version = _version(operands[i]) + 1
        while isinstance(memory.origin, _Origin):
            _push(memory.origin, local)
            memory.seen = memory.family.version
            local = memory.origin.base
            memory = _memory_or_new(local)
            memory.counted = version


def _refresh(memory: _Memory, local: torch.Tensor, all_of_them: bool) -> None:
    """Update the copy `memory` from its base, after updating the copies it derives from: stale ones, or all of them."""
    origin = memory.origin
    assert origin is not None, "a base is never stale"
    if isinstance(origin, _Lost):
        raise ShardingError(
            f"this DTensor of shape {list(origin.shape)} is a view that a compiled function returned, and a copy "
            "because a sharded dimension moved. Its base was written to since, which the copy does not see; make the "
            "view again, or return view.clone() if you want the old values"
        )
    base = _memory_or_new(origin.base)
    if base.origin is not None and (base.stale or all_of_them):
        _refresh(base, origin.base, all_of_them)
    for made, (own, spec) in zip(origin.of(make(origin.base, origin.spec)), origin.own(local)):
        _copy(own, redistribute_local(made._local_tensor, made._spec, spec.layout))
    memory.seen = memory.family.version


def _push(origin: _Origin, local: torch.Tensor) -> None:
    if not origin.moved:
        # A contiguous clone of the shard normally has the view that the shard itself lacks.
        held = origin.base.clone(memory_format=torch.contiguous_format)
        for view, (own, _) in zip(origin.of(make(held, origin.spec)), origin.own(local)):
            if not is_alias_of(view._local_tensor, held):
                break
            view._local_tensor.copy_(own)
        else:
            origin.base.copy_(held)
            return
    held = _whole(origin.base, origin.spec).clone(memory_format=torch.contiguous_format)
    for view, (own, spec) in zip(origin.of(held), origin.own(local)):
        view.copy_(_whole(own, spec))
    replicated = origin.spec.with_layout(_replicated(origin.spec))
    origin.base.copy_(redistribute_local(held, replicated, origin.spec.layout))


def _check_writable(func: OpOverload, x: Any) -> None:
    memory = _memory(x._local_tensor)
    while memory is not None and memory.origin is not None:
        if isinstance(memory.origin, _Lost):
            raise OperatorError(
                f"{func} would write to a view of shape {list(memory.origin.shape)} that a compiled function returned. "
                "It is a copy because a sharded dimension moved, so its base would not see the write; write to the "
                "base, or to view.clone()"
            )
        for _, spec, *_ in memory.origin.parts:
            if _overlaps(spec):
                raise OperatorError(
                    f"{func} would write to a view of shape {list(spec.shape)} and strides {list(spec.stride)}, in "
                    "which elements of its base appear several times, and which is a copy because a sharded dimension "
                    "moved; write to the base, or to view.clone()"
                )
        memory = _memory(memory.origin.base)


def _check_input(local: torch.Tensor) -> None:
    """Refuse a compiled function's write to an input that shares memory with a tensor that would not see the write.

    Each input of a graph is a separate tensor. Another input that is a view of this one would keep its old values, and
    if this one is a copy, its base is not part of the graph.

    Raises:
        ShardingError: `local` is the local tensor of such an input.
    """
    node: Any = graph_node(local)
    while node is not None and node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
        node = node.args[0]  # a copy_ stands for an input after a write
    if node is None or node.op != "placeholder":
        return
    memory, storage = _memory(local), local.untyped_storage()._cdata
    given = [other.meta.get("val") for other in node.graph.find_nodes(op="placeholder") if other is not node]
    others = [x for x in given if isinstance(x, FakeTensor)]
    shared = [x for x in others if x.untyped_storage()._cdata == storage or (memory and memory.of_family(x))]
    if shared:
        raise ShardingError(
            "a compiled function writes to an input that shares memory with another input (local shapes "
            f"{list(local.shape)} and {list(shared[0].shape)}), which would not see the write; pass only the base and "
            "make the views inside, or call clone() on the input that is only read"
        )
    if memory is not None and memory.origin is not None:
        raise ShardingError(
            f"a compiled function writes to an input (local shape {list(local.shape)}) that is a view made outside, "
            "and a copy because a sharded dimension moved; pass the base and make the view inside"
        )


def _overlaps(spec: Spec) -> bool:
    """Whether several elements of the tensor may share one element of memory."""
    if not spec.static or 0 in spec.shape:
        return False
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(spec.stride, spec.shape) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values; elements that share memory, as after `expand`, are written once."""
    for dim, step in enumerate(into.stride()):
        if isinstance(step, int) and step == 0 and into.shape[dim] > 1:
            into, source = into.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    into.copy_(source)


def _version(x: Any) -> int:
    return 0 if x.is_inference() else x._version


def _memory(local: torch.Tensor) -> _Memory | None:
    if type(local) is Pending:
        if not local.done:
            return None
        local = local.wait()
    return getattr(local.untyped_storage(), ATTRIBUTE, None) if local.layout == torch.strided else None


def _memory_or_new(local: torch.Tensor) -> _Memory:
    found = _memory(local)
    if found is None:
        found = _Memory(_Family())
        setattr(waited(local).untyped_storage(), ATTRIBUTE, found)
    return found


def _place(local: torch.Tensor) -> tuple[Any, ...]:
    return tuple(local.shape), local.stride(), local.storage_offset()


def _at(local: torch.Tensor, dtype: torch.dtype, place: tuple[Any, ...]) -> torch.Tensor:
    """The tensor at `place` in the storage of `local`."""
    if local.dtype != dtype:
        length = local.untyped_storage().nbytes() // local.dtype.itemsize
        local = local.as_strided((length,), (1,), 0).view(dtype)
    return local if place == _place(local) else local.as_strided(*place)


def _dtensors(a: Any) -> Any:
    if hasattr(a, "_spec"):
        yield a
    elif isinstance(a, (list, tuple)):
        for item in a:
            yield from _dtensors(item)
    elif isinstance(a, dict):
        for item in a.values():
            yield from _dtensors(item)


def _replicated(spec: Spec) -> Layout:
    return Layout.make(spec.mesh.ndim, ((),) * spec.ndim, ())


def _whole(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    return redistribute_local(local, spec, _replicated(spec))


__all__ = ["copies", "fresh", "freshen", "install", "lose", "remember", "root", "wrote"]
