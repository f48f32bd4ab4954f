"""Views that are copies: one memory to the program, several in fact.

A view of a DTensor shares its local tensor's memory, unless the operands had to be redistributed, or the shard has no
such view. Such a result is a copy, and what it was made by is noted: the base is the truth, the copy follows it.

    write to a copy     the base is brought up to date at once: gathered, viewed, written and cut again
    write to any        the version that base and copies share counts up: every copy but the one written to is stale
    read of a copy      one that is stale is made again from its base, in place, and its base before it

All of that hangs on the storage of the local tensors. So it holds for every DTensor that shares memory with a base or
a copy, however it came to that: by `detach`, by `.data`, by a view made before the copy was. Whether a copy is stale
follows from the order of the operators alone, which is the same on all ranks; a copy that only some ranks have, of a
shard that has no such view, is made again without communication.

How a copy was made that a compiled function returns only its graph knew. It is noted what it is a view of (`lose`), and
reading it once it is stale, or writing to it, is an error.

What is written to a local tensor by plain torch, through `to_local` or the tensor given to `from_local`, counts nothing
up: copies do not see it.
"""

import weakref
from typing import Any

import torch

from ..comm.pending_tensor import Pending, waited
from ..comm.redistribute import redistribute_local
from ..errors import OperatorError, ShardingError
from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..torch_private.core import FakeTensor, OpOverload, below_autograd, functionalized, graph_node, is_alias_of

ATTRIBUTE = "dtensor_memory"
"""Attribute of a storage: its `_Memory`, if it is that of a base or of a copy."""

copies: set[int] = set()
"""One entry for each copy in use. While there are none no operand has to be looked at."""

make: Any
"""Makes a DTensor of a local tensor and a spec; set by `install`."""


def install(wrap: Any) -> None:
    """Tell how a DTensor is made."""
    global make
    make = wrap


class _Family:
    """What base and copies share: how often any of them was written to."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0


class _Memory:
    """What is known of one storage: its family, how it was made if it is a copy, and the version it was made at.

    Attributes:
        counted: autograd's version of the copy, which it shares with its base: compiled functions write past dispatch,
            and count up nothing else.
    """

    __slots__ = ("counted", "family", "origin", "seen")

    def __init__(self, family: _Family, origin: "_Origin | _Lost | None" = None, counted: int = 0) -> None:
        self.family, self.origin, self.seen, self.counted = family, origin, family.version, counted

    @property
    def stale(self) -> bool:
        return self.origin is not None and (self.seen != self.family.version or self.origin.changed)

    def of_family(self, local: torch.Tensor) -> bool:
        """Whether another local tensor lies in the memory of a base or copy of the same family."""
        other = _memory(local)
        return other is not None and other.family is self.family


class _Origin:
    """How a copy was made: results of `func(base, *args, **kwargs)`, of which several may lie in one storage.

    Attributes:
        base, spec: the local tensor of the base, and its spec.
        moved: whether operands were redistributed: of another copy only this rank may know.
        parts: for each result its index (None of an operator that gives one), its spec, where it lies in the storage,
            and a weak reference to its local tensor: a strong one would hold the storage that holds it.
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
        """The view of `base`, plain or not, for each part."""
        made = self.func(base, *self.args, **self.kwargs)
        return [made if index is None else made[index] for index, *_ in self.parts]

    def own(self, local: torch.Tensor) -> list[tuple[torch.Tensor, Spec]]:
        """Local tensor and spec of each part; `local` is any tensor in the copy's storage."""
        found = []
        for _, spec, place, made in self.parts:
            known = made()
            found.append((_at(local, spec.dtype, place) if known is None else known, spec))
        return found


class _Lost:
    """The origin of a copy that a compiled function returned: what it is a view of, but not how it was made.

    Attributes:
        shape: of the copy.
        bases: (weak reference, autograd's version then) of DTensors that it is a view of and the program has.
    """

    __slots__ = ("bases", "shape")

    def __init__(self, shape: torch.Size, bases: list[Any]) -> None:
        self.shape, self.bases = shape, [(weakref.ref(x), _version(x)) for x in bases]
        copies.add(id(self))

    def __del__(self) -> None:
        copies.discard(id(self))

    @property
    def changed(self) -> bool:
        """Whether a base was written to, by whatever counts versions."""
        return any((x := base()) is not None and _version(x) != before for base, before in self.bases)


def root(x: Any) -> tuple[int, bool]:
    """A number for the memory that `x` has on one device, and whether `x` is a copy of it."""
    local, is_copy = x._local_tensor, False
    while (memory := _memory(local)) is not None and isinstance(memory.origin, _Origin):
        local, is_copy = memory.origin.base, True
    return local.untyped_storage()._cdata, is_copy


def lose(made: list[Any], bases: list[Any]) -> None:
    """Note that the DTensors `made`, which a compiled function returned, are copies.

    On one device they share memory, with each other and with `bases`.
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
    """Note in the results of `func`, a view, what they are views of, if they are copies.

    Args:
        moved: the base was redistributed.
        taken_apart: `func` was run as other operators; those that are views have noted it already.
    """
    base, many = args[0], isinstance(out, (list, tuple))
    # The last is what nearly all views are.
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
            # All ranks take it for a copy, so it is one.
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
            memory.origin.parts.append((index if many else None, made._spec, _place(part), weakref.ref(part)))


def freshen(written: tuple[int, ...], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make stale copies among the operands of a call again, before it runs and writes to those at `written`.

    Raises:
        OperatorError: it would write to a copy several elements of which are one element of its base.
    """
    operands = list(_dtensors((args, kwargs)))
    for x in operands:
        fresh(x)
    for i in written:
        _check_writable(func, operands[i])


def fresh(x: Any) -> Any:
    """The DTensor `x`, made again in place if it is a stale copy."""
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
    """The operands at `written` were written to: so are the bases of those that are copies; other copies are stale."""
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
    """Make the copy `memory` again; first the copies it is made of, those that are stale or `all_of_them`."""
    origin = memory.origin
    assert origin is not None, "a base is never stale"
    if isinstance(origin, _Lost):
        raise ShardingError(
            f"this DTensor of shape {list(origin.shape)} is a view that a compiled function returned, and a copy, as "
            "a sharded dimension moved. What it is a view of was written to since, and it does not see that; make the "
            "view again, or return view.clone() if the old values are wanted"
        )
    base = _memory_or_new(origin.base)
    if base.origin is not None and (base.stale or all_of_them):
        _refresh(base, origin.base, all_of_them)
    for made, (own, spec) in zip(origin.of(make(origin.base, origin.spec)), origin.own(local)):
        _copy(own, redistribute_local(made._local_tensor, made._spec, spec.layout))
    memory.seen = memory.family.version


def _push(origin: _Origin, local: torch.Tensor) -> None:
    if not origin.moved:
        # In rows one after the other, a shard has every view that it may be asked for.
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
                f"{func} would write to a view of shape {list(memory.origin.shape)} that a compiled function returned, "
                "and that is a copy because a sharded dimension moved: what it is a view of would not see it; write to "
                "that, or to view.clone()"
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
    """Refuse that a compiled function writes to an input that shares memory with what it cannot see change.

    Each input of a graph is a tensor of its own: another one that is a view of it would keep its values, and the base
    of one that is a copy is no part of the graph.

    Raises:
        ShardingError: `local` is that of such an input.
    """
    node: Any = graph_node(local)
    while node is not None and node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
        node = node.args[0]  # what stands for an input once it was written to
    if node is None or node.op != "placeholder":
        return
    memory, storage = _memory(local), local.untyped_storage()._cdata
    given = [other.meta.get("val") for other in node.graph.find_nodes(op="placeholder") if other is not node]
    others = [x for x in given if isinstance(x, FakeTensor)]
    shared = [x for x in others if x.untyped_storage()._cdata == storage or (memory and memory.of_family(x))]
    if shared:
        raise ShardingError(
            "a compiled function writes to an input that shares memory with another input (local shapes "
            f"{list(local.shape)} and {list(shared[0].shape)}), which would not see it; give it the base alone and "
            "make the views inside, or call clone() on what is only read"
        )
    if memory is not None and memory.origin is not None:
        raise ShardingError(
            f"a compiled function writes to an input (local shape {list(local.shape)}) that is a view made outside, "
            "and a copy because a sharded dimension moved; give it the base and make the view inside"
        )


def _overlaps(spec: Spec) -> bool:
    """Whether an element of memory may stand for several of the tensor."""
    if not spec.static or 0 in spec.shape:
        return False
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(spec.stride, spec.shape) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values; what is repeated in memory, as by `expand`, is written once."""
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
    """What lies at `place` in the storage of `local`."""
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
