"""DTensor: a tensor subclass that holds this rank's local tensor, the device mesh and the layout.

Eager operators arrive in `__torch_dispatch__` and go to `dispatch`. For `torch.compile` the class implements the
traceable wrapper protocol: it flattens to (local tensor, mesh) with the layout as context, and coerces tangents. The
conversions from and to plain tensors, `from_local` and `to_local`, are autograd functions. `redistribute` is a single
operator, `dtensor::redistribute`, with a registered gradient.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.between_meshes import exchanged
from ..comm.from_plain import (
    check_replicas,
    is_torch_dtensor,
    is_tracing,
    mesh_of,
    refuse_export,
    refuse_function_transforms,
    refuse_tangent,
)
from ..comm.pending_tensor import Pending, waited
from ..comm.redistribute import check_dtypes, check_target, redistribute_local
from ..comm.replication_check import BY_STYLE, note_taken
from ..comm.wire_dtypes import check_reducible
from ..dispatch import multi_step as multi_step  # registers how dispatch runs operators without a rule
from ..dispatch import out_variants as out_variants  # registers how dispatch runs out= variants
from ..dispatch.decision import COMPOSITES
from ..dispatch.dispatch import dispatch, install
from ..dispatch.plain_operands import region_of_torch
from ..dispatch.view_copies import copies, fresh
from ..errors import ArgumentError, ArgumentTypeError, PlacementError, ShardingError
from ..layout.layout import Layout
from ..layout.placements import Partial, Placement, Replicate, Shard, as_placements, parsed, words
from ..layout.planner import Prefer
from ..mesh.mesh import facts, mesh_shape, unpickled, world_of
from ..mesh.operator_library import library
from ..mesh.tensor_spec import Spec, contiguous_stride, define_local_sizes
from ..torch_private.core import (
    OWN_KEYSET,
    FakeTensor,
    disable_dynamo,
    disabled_torch_function,
    make_wrapper_subclass,
    never_traced,
)
from ..torch_private.dynamo import attributes_stand_with_their_tensors, inner_sizes_follow
from . import dcp_protocol
from .declared_layouts import gradient_placements, wrong_sizes
from .own_losses import mark, own_loss_axes
from .raw_memory import BY_ELEMENT, OUTSIDE, READING, on_local_tensors, on_whole_tensors

PLAIN_INDICES = frozenset((int, slice, type(None), type(...)))
"""Index types that are quickly recognised as what torch makes no tensors of."""
SEQUENCES = (list, tuple, range)
_getitem, _setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__


class DTensor(torch.Tensor):
    """A tensor distributed over a device mesh.

    Create one with `DTensor.from_local`, `distribute_tensor` or a factory such as `zeros`; do not call the class.
    `shape`, `stride()` and `dtype` are those of the global tensor.

    Attributes:
        device_mesh: the `DeviceMesh` that the tensor is distributed over.
        placements: one placement per mesh axis.
    """

    __slots__ = ("_local_tensor", "_spec", "device_mesh")
    _local_tensor: torch.Tensor
    _spec: Spec
    device_mesh: DeviceMesh
    _own_losses: tuple[Layout, tuple[int, ...]] | None = None

    __torch_function__: Any = disabled_torch_function  # pyright: ignore[reportAssignmentType]
    numpy: Any
    tolist: Any
    pin_memory: Any
    share_memory_: Any
    __dlpack__: Any
    apply_: Any
    map_: Any
    map2_: Any
    numpy, tolist, __dlpack__ = map(on_whole_tensors, READING)  # pyright: ignore
    pin_memory, share_memory_ = map(on_local_tensors, OUTSIDE)  # pyright: ignore
    apply_, map_, map2_ = map(on_local_tensors, BY_ELEMENT)  # pyright: ignore

    @staticmethod
    @disable_dynamo
    def __new__(
        cls,
        local_tensor: Any,
        device_mesh: DeviceMesh,
        layout: Layout,
        shape: Any = None,
        stride: Any = None,
        requires_grad: bool = False,
    ) -> Any:
        if shape is None or stride is None:
            raise ArgumentError(
                "calling the DTensor class takes the global shape and stride, too; write DTensor.from_local(x, "
                "device_mesh, placements) for this rank's part, or distribute_tensor(x, device_mesh, placements) for a "
                "global tensor"
            )
        # Dynamo puts this call into its graph as it stands, so it takes what a graph can hold.
        if not isinstance(layout, Layout):
            layout = Layout.of(tuple(layout), len(shape))
        if local_tensor.requires_grad and torch.is_grad_enabled():
            raise ShardingError(
                f"calling the DTensor class on a tensor that requires a gradient (of shape "
                f"{list(local_tensor.shape)}) would detach the result from its graph and lose the gradient; write "
                "DTensor.from_local(x, device_mesh, placements), or pass x.detach() if no gradient is needed"
            )
        if device_mesh.get_coordinate() is None:
            local_tensor = local_tensor.new_empty(0)
        return _wrap(local_tensor, Spec.make(device_mesh, layout, shape, stride, local_tensor.dtype), requires_grad)

    __torch_dispatch__: Any = staticmethod(never_traced(dispatch))  # pyright: ignore[reportAssignmentType]

    # A compiled function's guards ask this twice of each parameter, in every call: it builds and calls nothing, and
    # there is no `__metadata_guard__`, as contexts compare in C.
    def __tensor_flatten__(self) -> Any:
        if type(self._local_tensor) is Pending:
            self._local_tensor = self._local_tensor.wait()
        if copies:
            fresh(self)
        return ("_local_tensor", "device_mesh"), self._own_losses or self._spec.layout.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: tuple[Any, ...], size: Any, stride: Any) -> "DTensor":
        local, layout = inner["_local_tensor"], context[0]
        spec = Spec.make(inner["device_mesh"], layout, size, stride, local.dtype)
        if not spec.static:
            define_local_sizes(spec, local)
        made = _wrap(local, spec, local.requires_grad)
        if len(context) == 2:
            mark(made, context[1], in_trace=True)
        return made

    def __coerce_tangent_metadata__(self) -> "DTensor":
        """The form in which tangents of this tensor are traced: the same layout, but never partial."""
        return move(self, self._spec.layout.without_partial())

    @never_traced
    def __coerce_same_metadata_as_tangent__(self, context: Any, expected_type: type | None = None) -> Any:
        """The tangent in the layout that it was traced with, or as a full plain tensor if it was traced as one."""
        if expected_type is torch.Tensor:
            return self.full_tensor()
        return move(self, context[0]) if expected_type is None else None

    def _stable_hash_for_caching(self) -> str:
        """The key of this tensor in AOTAutograd's cache: everything that the traced graph may depend on."""
        local = self._local_tensor
        known = [
            *map(str, (self._spec, self._spec.stride, self.requires_grad, self._own_losses and self._own_losses[1])),
            world_of(self.device_mesh),
        ]
        inner = (tuple(local.shape), local.stride(), local.dtype, local.device, local.requires_grad)
        return hashlib.blake2b("|".join([*known, str(inner)]).encode(), digest_size=16).hexdigest()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    @property
    def data(self) -> Any:
        """As `torch.Tensor.data`. Assigning a DTensor makes this tensor share its memory, placements and mesh.

        Raises:
            TypeError: the assigned value is not a DTensor.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, new: Any) -> None:
        if not isinstance(new, DTensor):
            raise ArgumentTypeError(
                f"the data of a DTensor is a DTensor, got {type(new).__name__}; write x.data = distribute_tensor(y, "
                "x.device_mesh, x.placements) with a global tensor, or x.to_local().copy_(y) with this rank's part"
            )
        new = fresh(new)
        _DATA.__set__(self, new)
        self._local_tensor, self._spec, self.device_mesh = (
            waited(new._local_tensor).detach(),
            new._spec,
            new.device_mesh,
        )
        if self._own_losses:
            mark(self, self._own_losses[1])

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> "DTensor":
        """A DTensor whose local tensor on this rank is `local_tensor`; differentiable.

        Args:
            local_tensor: this rank's part of the global tensor. Without `run_check` the result shares its memory.
            device_mesh: the mesh; None uses the current one.
            placements: one per mesh axis; None replicates.
            run_check: compare shape and dtype across ranks, and broadcast replicas from the first rank of their axis.
            shape: the global shape. Without shape and stride every rank is assumed to hold a shard of this one's shape;
                uneven shards need both.
            stride: the global stride, in elements. Give both shape and stride or neither.
            grad_placements: the placements of the gradient that `local_tensor` receives; None uses `placements` with
                Partial replaced by Replicate. The gradient has the shape of the local tensor, so its dims must be
                sharded as in `placements`.

        Raises:
            PlacementError: placements do not fit mesh or tensor, or Partial its dtype (an average of integers, a
                maximum of complex numbers); `grad_placements` cannot be those of a local gradient;
                `local_tensor` is not this rank's shard of a tensor of `shape`, which is raised on this rank only unless
                `run_check`; or, with `run_check`, shape or dtype differ between ranks, which is raised on all of them.
            ValueError: only one of shape and stride was given.
            TypeError: `local_tensor` is not a plain, strided tensor.
            MeshError: `device_mesh` is not a mesh, or is None and no mesh is current.
        """
        refuse_export()
        if isinstance(local_tensor, DTensor) or not isinstance(local_tensor, torch.Tensor):
            raise ArgumentTypeError(
                f"from_local takes this rank's plain tensor, got {type(local_tensor).__name__}; write "
                "x.redistribute(placements=...) for a DTensor, torch.tensor(x) for other values"
            )
        if local_tensor.layout != torch.strided:
            raise ArgumentTypeError(f"from_local takes a strided tensor, got {local_tensor.layout}; write x.to_dense()")
        mesh = mesh_of(device_mesh)
        if (shape is None) != (stride is None):
            raise ArgumentError(
                f"from_local takes shape and stride together or neither; got shape={shape}, stride={stride}"
            )
        if torch.compiler.is_dynamo_compiling() and not run_check:
            given = words(placements), shape or (), stride or (), words(grad_placements)
            return torch.ops.dtensor.from_local(local_tensor, mesh, *given)
        if type(local_tensor) is not torch.Tensor and is_torch_dtensor(local_tensor):
            raise ArgumentTypeError(
                "from_local takes this rank's plain tensor, got a DTensor of torch.distributed.tensor, of which every "
                "rank holds a part already; write dtensor.interop.from_torch(x)"
            )
        ndim = local_tensor.dim()
        checked = as_placements(placements, mesh.ndim, ndim)
        refuse_tangent(local_tensor, "from_local")
        layout = Layout.of(checked, ndim)
        for _, reduce_op in layout.partial:
            check_reducible(local_tensor.dtype, reduce_op)
        grads = layout.without_partial()
        if grad_placements is not None:
            grads = Layout.of(gradient_placements(grad_placements, mesh.ndim, ndim, checked), ndim)
        wrong = "" if shape is None else wrong_sizes(local_tensor, mesh, checked, shape, stride)
        if run_check:
            local_tensor = check_replicas(local_tensor, mesh, checked, with_shape=shape is None, wrong=wrong)
        elif wrong:
            raise PlacementError(f"from_local: {wrong}")
        if shape is None or stride is None:
            shape, stride = _global_sizes(local_tensor, mesh, checked)
        refuse_function_transforms("from_local")
        return FromLocal.apply(local_tensor, mesh, layout, tuple(shape), tuple(stride), grads)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's local tensor; differentiable. The result shares memory with this tensor.

        Args:
            grad_placements: the placements that the local gradients are assumed to have; None uses this tensor's, with
                Partial replaced by Replicate. Local gradients have the shape of the local tensor, so their dims must be
                sharded like this tensor's. Over the data axes of `fully_shard` each rank has a loss of its own: for its
                parameters, and what is computed from them, None averages the gradients there.

        Raises:
            PlacementError: `grad_placements` cannot be those of a local gradient.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.ops.dtensor.to_local(self, words(grad_placements))
        refuse_tangent(self, "to_local")
        grads = self._spec.layout.without_partial()
        if grad_placements is not None:
            ndim = self.dim()
            grads = Layout.of(gradient_placements(grad_placements, self.device_mesh.ndim, ndim, self.placements), ndim)
        if copies:
            fresh(self)
        if not torch.is_grad_enabled() or not self.requires_grad:
            return _alias(self._local_tensor)
        refuse_function_transforms("to_local and full_tensor")
        if grad_placements is None and (axes := own_loss_axes(self)):
            grads = _averaged(grads, axes)
        return _ToLocal.apply(self, grads)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        grad_placements: Sequence[Placement] | None = None,
        prefer: Prefer = "time",
    ) -> "DTensor":
        """The same global tensor in other placements, or on another mesh; differentiable any number of times.

        Args:
            device_mesh: the target mesh; None keeps this tensor's. Moving to another mesh works in eager mode only.
                Every rank of both meshes must call this, ranks outside this tensor's mesh with their empty local
                tensor, and a process group over both meshes is needed (`prepare`).
            placements: one per mesh axis; None replicates.
            async_op: return once the last collective has started; the result waits for it on first use.
            forward_dtype: the dtype that local tensors are cast to before they are sent, which is also the dtype of the
                result. None keeps this tensor's.
            backward_dtype: the dtype that local gradients are cast to before they are sent; None uses this tensor's.
                The gradient that this tensor receives always has this tensor's dtype.
            grad_placements: the placements of the gradient that this tensor receives; None uses its own placements,
                with Partial replaced by Replicate.
            prefer: "time" takes the fastest plan that allocates no more than necessary, "memory" the plan with the
                lowest peak memory. See `dtensor.layout.planner`.

        Returns:
            A DTensor; this tensor itself if placements, mesh, dtypes and `grad_placements` leave nothing to do.

        Raises:
            PlacementError: placements do not fit mesh or tensor, or would turn another placement into Partial.
            MeshError: there is no process group over both meshes.
            ValueError: `prefer` is not "time" or "memory", or a dtype was given with another mesh.
            TypeError: `forward_dtype` is not a dtype, or gradients cannot have `backward_dtype`.
            ShardingError: a move to another mesh was called while a graph is traced.
        """
        refuse_export()
        check_dtypes(forward_dtype, backward_dtype)
        if device_mesh is not None and device_mesh != self.device_mesh:
            device_mesh = mesh_of(device_mesh)
            if forward_dtype is not None or backward_dtype is not None:
                raise ArgumentError("no dtypes go with a move to another mesh; write x.to(dtype).redistribute(mesh, …)")
            return _to_mesh(self, device_mesh, placements, grad_placements)
        target = as_placements(placements, self.device_mesh.ndim, self.dim())
        if prefer not in ("time", "memory"):
            raise ArgumentError(f"prefer is 'time' or 'memory'; got {prefer!r}")
        if target == self.placements and grad_placements is None and forward_dtype is None and backward_dtype is None:
            return self
        check_target(self.placements, target)
        if not torch.compiler.is_dynamo_compiling():
            refuse_tangent(self, "redistribute")
        grads = ()
        if grad_placements is not None:
            grads = gradient_placements(grad_placements, self.device_mesh.ndim, self.dim())
        dtypes = {} if forward_dtype is None else {"dtype": forward_dtype}
        if backward_dtype is not None or forward_dtype is not None:
            dtypes["grad_dtype"] = backward_dtype or self.dtype
        return torch.ops.dtensor.redistribute(self, _text(target), async_op, _text(grads), prefer, **dtypes)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor as a plain tensor on every rank; differentiable.

        Args:
            grad_placements: as in `to_local`, relative to the replicated tensor.
        """
        replicated = (Replicate(),) * self.device_mesh.ndim
        whole = self.redistribute(placements=replicated)
        return whole.to_local(grad_placements=grad_placements)

    def is_pinned(self, device: Any = None) -> bool:
        """Whether this rank's local tensor is in pinned memory."""
        return fresh(self)._local_tensor.is_pinned()

    def new_tensor(
        self, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        """As `torch.Tensor.new_tensor`: a plain tensor, by default with this tensor's dtype and device."""
        return self._local_tensor.new_tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)

    def __getitem__(self, index: Any) -> Any:
        """As `torch.Tensor.__getitem__`. What torch makes plain tensors of is taken: lists, and masks without dims."""
        given = index if type(index) is tuple else (index,)
        for i in given:
            if type(i) not in PLAIN_INDICES:
                if _makes_tensors(given):
                    with region_of_torch():
                        return _getitem(self, index)
                break
        return _getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """As `torch.Tensor.__setitem__`, with the same indices as `__getitem__`."""
        given = index if type(index) is tuple else (index,)
        if not PLAIN_INDICES.issuperset(map(type, given)) and _makes_tensors(given):
            with region_of_torch():
                _setitem(self, index, value)
        else:
            _setitem(self, index, value)

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As `torch.Tensor.backward`. A plain `gradient` counts as replicated."""
        if isinstance(gradient, torch.Tensor) and not isinstance(gradient, DTensor):
            gradient = DTensor.from_local(gradient, self.device_mesh)
            gradient = gradient.redistribute(placements=self._spec.layout.without_partial().placements)
        super().backward(gradient, retain_graph, create_graph, inputs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        text = tensor_contents if tensor_contents is not None else repr(fresh(self)._local_tensor)
        return f"DTensor(local_tensor={text}, device_mesh={self.device_mesh}, placements={self.placements})"

    def __format__(self, format_spec: str) -> str:
        """As `torch.Tensor.__format__`: a tensor without dimensions is formatted as its number."""
        if self.dim() == 0 and not self.is_meta:
            return self.item().__format__(format_spec)
        return object.__format__(self, format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        spec, local = self._spec, fresh(self)._local_tensor.detach()
        others = dict(vars(self))  # the parameter mark, and attributes set by users
        state = (spec.mesh, spec.layout.text, tuple(spec.shape), tuple(spec.stride), self.requires_grad, others)
        return _rebuild, (
            local,
            *state,
            _part(spec.layout, spec.coordinate),
            dist.get_rank() if dist.is_initialized() else 0,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            raise ShardingError("only leaf DTensors can be deep-copied; write copy.deepcopy(x.detach())")
        made = memo.get(id(self))
        if made is None:
            made = _wrap(fresh(self)._local_tensor.detach().clone(), self._spec, self.requires_grad)
            for name in vars(self).keys() - vars(made).keys():
                setattr(made, name, vars(self)[name])
            memo[id(self)] = made
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        return dcp_protocol.write_items(self._spec, fresh(self)._local_tensor.detach(), fqn)

    def __create_chunk_list__(self) -> Any:
        return dcp_protocol.chunk_list(self._spec)

    def __get_tensor_shard__(self, index: Any) -> Any:
        return dcp_protocol.tensor_shard(self._spec, fresh(self)._local_tensor.detach(), index)


_DATA: Any = torch.Tensor.data


def _averaged(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout of a local tensor's gradients, `layout`, where each rank of `axes` has a loss of its own."""
    split = {axis for on_dim in layout.dims for axis in on_dim}
    return Layout.make(layout.mesh_ndim, layout.dims, tuple([(axis, "avg") for axis in axes if axis not in split]))


def _rebuild(
    local: Any,
    mesh: DeviceMesh,
    text: str,
    shape: Any,
    stride: Any,
    requires_grad: bool,
    others: Any,
    part: Any,
    rank: int,
) -> Any:
    """The DTensor that was pickled, from values that `torch.load` accepts by default.

    Raises:
        ShardingError: the local tensor is another part of the global tensor than the one that belongs to this rank.
        MeshError: as for `unpickled`.
    """
    layout = Layout.parse(text, len(shape))
    mesh = unpickled(mesh, rank)
    own = _part(layout, mesh.get_coordinate())
    # What guards of a compiled frame hold of a tensor has no values, and serves all ranks.
    if own is not None and own != part and not (local.is_meta or isinstance(local, FakeTensor)):
        raise ShardingError(
            f"this file or message holds the part of a DTensor of shape {list(shape)} in layout {text} that belongs to "
            f"{_whose(part)}; this rank is {_whose(own)}. Pickle whole tensors, x.full_tensor() or get_model_state_dict"
            "(model, options=StateDictOptions(full_state_dict=True)); or let every rank write and read a file of its "
            "own; or use dtensor.Checkpoints, which reads on any mesh"
        )
    made = DTensor(local, mesh, layout, shape, stride, requires_grad)
    vars(made).update(others)
    return made


def _part(layout: Layout, coordinate: Any) -> list[list[int]] | None:
    """Which part of a global tensor a rank holds: (axis, coordinate) for all axes on which parts differ. None: none."""
    if coordinate is None:
        return None
    return [[a, coordinate[a]] for a, p in enumerate(layout.placements) if not isinstance(p, Replicate)]


def _whose(part: list[list[int]] | None) -> str:
    return "no rank of its mesh" if part is None else ", ".join(f"coordinate {c} on mesh axis {a}" for a, c in part)


torch.serialization.add_safe_globals([_rebuild])


def _makes_tensors(given: tuple[Any, ...]) -> bool:
    """Whether torch makes plain tensors of one of these indices: of sequences, or of the value of a mask without
    dims."""
    return any(isinstance(i, (*SEQUENCES, bool)) or (isinstance(i, torch.Tensor) and i.dim() == 0) for i in given)


def _text(placements: tuple[Placement, ...]) -> str:
    return "".join([str(p) for p in placements])


def _alias(local: torch.Tensor) -> torch.Tensor:
    return local.view_as(local) if local.layout == torch.strided else local.detach()


@never_traced
def _wrap(local: torch.Tensor, spec: Spec, requires_grad: bool = False) -> DTensor:
    # Positional arguments, because keywords take torch a fifth longer.
    offset, memory, pinned, policy, by_device, by_layout = None, None, False, None, False, False
    self = make_wrapper_subclass(
        DTensor,
        spec.shape,
        spec.unusual_stride,
        offset,
        memory,
        spec.dtype,
        torch.strided,
        local.device,
        pinned,
        requires_grad,
        policy,
        by_device,
        by_layout,
        OWN_KEYSET,
    )
    self._local_tensor = local
    self._spec = spec
    self.device_mesh = spec.mesh
    return self


def _global_sizes(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Global shape and stride if every shard has the shape of `local`. Dense strides keep their order of dims."""
    shape, stride = list(local.shape), list(local.stride())
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            n, step = mesh.size(axis), stride[p.dim]
            shape[p.dim] = shape[p.dim] * n
            stride = [s * n if i != p.dim and s > step else s for i, s in enumerate(stride)]
    return shape, stride


def fake_like(x: DTensor) -> DTensor:
    """A DTensor like `x` with an uninitialised local tensor. Under a fake mode it uses no memory."""
    local = x._local_tensor
    made = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
    return _wrap(made, x._spec, x.requires_grad)


@never_traced
def move(x: DTensor, layout: Layout) -> DTensor:
    """`x` in another layout, below autograd."""
    if x._spec.layout is layout:
        return x
    with torch.no_grad():
        return _redistribute(x, layout)


def _redistribute(
    x: DTensor, layout: Layout, async_op: bool = False, prefer: Prefer = "time", asked: bool = False
) -> DTensor:
    if copies:
        fresh(x)
    local = redistribute_local(x._local_tensor, x._spec, layout, async_op=async_op, prefer=prefer, asked=asked)
    return _wrap(local, x._spec.with_layout(layout))


def layout_in(x: DTensor, text: str) -> Layout:
    """The layout that a call of `dtensor::redistribute` asks for; "" is the tensor's own."""
    return Layout.parse(text, x.dim()) if text else x._spec.layout


def homing(x: DTensor, what: str, backward_dtype: torch.dtype | None = None) -> DTensor:
    """`x`, with a gradient that arrives in the layout of `x` and is not partial. In compiled code nothing guards that
    layout beside what guards the tensor.

    Args:
        what: what `x` is, for an error.
        backward_dtype: the dtype in which the gradient is sent; None for that of `x`.
    """
    if not torch.compiler.is_dynamo_compiling():
        refuse_tangent(x, what)
    return torch.ops.dtensor.redistribute(x, "", False, grad_dtype=backward_dtype)


library.define(
    "redistribute(Tensor x, str layout, bool async_op, str grad_layout='', str prefer='time', "
    "ScalarType? dtype=None, ScalarType? grad_dtype=None) -> Tensor",
)


def _redistribute_operator(
    x: DTensor,
    text: str,
    async_op: bool = False,
    grad_layout: str = "",
    prefer: Prefer = "time",
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
) -> DTensor:
    """The implementation of `dtensor::redistribute` that dispatch runs on a DTensor."""
    layout = layout_in(x, text)
    if dtype is not None:
        spec = x._spec
        spec = Spec.make(spec.mesh, spec.layout, spec.shape, spec.stride, dtype)
        x = _wrap(fresh(x)._local_tensor.to(dtype), spec)
    return _redistribute(x, layout, async_op and not is_tracing(x), prefer, asked=True)


@never_traced
def _save_layout(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)  # zeros in place of a gradient would be a plain tensor
    ctx.layout = inputs[3] or inputs[0]._spec.layout.without_partial().text
    ctx.prefer = inputs[4]
    ctx.dtype, ctx.grad_dtype = inputs[0].dtype, inputs[6]


@never_traced
def _redistribute_backward(ctx: Any, grad: Any) -> Any:
    if grad is not None:
        refuse_tangent(grad, "the gradient of redistribute")
        sent = ctx.grad_dtype
        if sent is not None or not (grad.__class__ is DTensor and grad._spec.layout.text == ctx.layout):
            grad = torch.ops.dtensor.redistribute(grad, ctx.layout, False, "", ctx.prefer, sent, sent)
        if grad.dtype != ctx.dtype:
            grad = grad.to(ctx.dtype)
    return grad, *[None] * 6


torch.library.register_autograd(
    "dtensor::redistribute", _redistribute_backward, setup_context=_save_layout, lib=library
)
COMPOSITES["dtensor::redistribute"] = _redistribute_operator


def _to_mesh(x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, grad_placements: Any) -> DTensor:
    """`x` on another mesh. Ranks send different messages, so no graph can contain it."""
    if is_tracing(x):
        raise ShardingError(
            f"redistribute from {x.device_mesh} to another mesh cannot be compiled: what it sends differs from rank to "
            "rank; call it outside the compiled function, or write @torch.compiler.disable on the function that does"
        )
    refuse_tangent(x, "redistribute")
    target = as_placements(placements, mesh.ndim, x.dim())
    check_target((Replicate(),) * mesh.ndim, target)
    layout = x._spec.layout.without_partial()
    if grad_placements is not None:
        layout = Layout.of(gradient_placements(grad_placements, x.device_mesh.ndim, x.dim()), x.dim())
    return _ToMesh.apply(x, mesh, Layout.of(target, x.dim()), layout)


class _ToMesh(torch.autograd.Function):
    border = True

    @staticmethod
    @never_traced
    def forward(ctx: Any, x: Any, mesh: DeviceMesh, layout: Layout, grad_layout: Layout) -> Any:
        ctx.set_materialize_grads(False)
        ctx.source = x.device_mesh, grad_layout, layout
        spec = Spec.make(mesh, layout, x._spec.shape, x._spec.stride, x._spec.dtype)
        return _wrap(exchanged(waited(fresh(x)._local_tensor), x._spec, spec), spec)

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None
        mesh, grad_layout, layout = ctx.source
        final = grad_layout.without_partial()
        grad = _ToMesh.apply(grad, mesh, final, layout)
        if final is not grad_layout:
            grad = torch.ops.dtensor.redistribute(grad, grad_layout.text, False)
        return grad, None, None, None


class FromLocal(torch.autograd.Function):
    """Local tensor to DTensor. The backward returns the local gradient in `grad_layout`, and is differentiable."""

    border = True

    @staticmethod
    @never_traced
    def forward(
        ctx: Any, local: Any, mesh: DeviceMesh, layout: Layout, shape: Any, stride: Any, grad_layout: Layout
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.grad_layout = layout, grad_layout
        return DTensor(_alias(local), mesh, layout, shape, stride, local.requires_grad)

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None, None, None
        # Do not inspect the gradient's layout here: Dynamo traces this with a guessed one; only dispatch knows it.
        grad = torch.ops.dtensor.redistribute(grad, ctx.grad_layout.text, False)
        local = grad.to_local()
        for axis, reduce_op in ctx.layout.partial:
            if reduce_op == "avg":
                local = local / mesh_shape(grad.device_mesh)[axis]
            elif reduce_op != "sum":
                raise ShardingError(
                    f"the gradient of from_local with {Partial(reduce_op)!r} is not defined; reduce before from_local"
                )
        return local, None, None, None, None, None


class _ToLocal(torch.autograd.Function):
    """DTensor to local tensor. The local gradient is taken as this rank's part of a gradient in `grad_layout`.

    A layout, unlike placements, also holds the order of two axes that shard one dim.
    """

    border = True

    @staticmethod
    @never_traced
    def forward(ctx: Any, x: Any, grad_layout: Layout) -> Any:
        ctx.set_materialize_grads(False)
        ctx.whole = x.device_mesh, grad_layout, tuple(x.shape), tuple(x.stride())
        return _alias(x._local_tensor)

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        mesh, layout, shape, stride = ctx.whole
        if torch.is_grad_enabled() and grad.requires_grad:
            return FromLocal.apply(grad, mesh, layout, shape, stride, layout.without_partial()), None
        return DTensor(_alias(grad), mesh, layout, shape, stride), None


# The operators that Dynamo records for `from_local` and `to_local`. It would trace an autograd function twice, forward
# and backward, which is slow, and the backward without a graph, so that it could not be differentiated again.
library.define(
    "from_local(Tensor(a) x, torch.distributed.device_mesh.DeviceMesh mesh, str placements, "
    "SymInt[] shape, SymInt[] stride, str grad_placements, bool alike=False) -> Tensor(a)"
)
library.define("to_local(Tensor(a) x, str grad_placements) -> Tensor(a)")


def _from_local_operator(
    x: Any, mesh: DeviceMesh, text: str, shape: Any, stride: Any, grad_text: str, alike: bool = False
) -> DTensor:
    """`dtensor::from_local`, decomposed at once for any tensor and any mode. Empty arguments were not given.

    `alike`: a plan assumes that `x` is the same on all ranks, and the graph checks it.
    """
    if alike:
        note_taken(x, facts(mesh).by_axis, BY_STYLE)
    sizes = {"shape": shape, "stride": stride} if shape or stride else {}
    placements, grads = (parsed(t) if t else None for t in (text, grad_text))
    return DTensor.from_local(x, mesh, placements, **sizes, grad_placements=grads)


def _to_local_operator(x: DTensor, grad_text: str) -> torch.Tensor:
    """`dtensor::to_local`, decomposed in the same way."""
    return x.to_local(grad_placements=parsed(grad_text) if grad_text else None)


library.impl("from_local", _from_local_operator, "CompositeImplicitAutograd")
library.impl("to_local", _to_local_operator, "CompositeImplicitAutograd")
COMPOSITES["dtensor::to_local"] = _to_local_operator


@never_traced
def complete_tangents(specs: dict[int, Spec], node: Any, tangents: list[Any]) -> None:
    """Bring the tangents passed to a compiled function's backward into the form it was traced with, in place.

    Args:
        specs: index of an output that is a DTensor -> its spec; the sizes in it are not used.
        node: the autograd node of the call, which has the sizes of its outputs.
        tangents: one for each output. Missing ones (None) become zeros, and a plain tensor for a DTensor output, which
            counts as replicated, becomes a DTensor.
    """
    for k, tangent in enumerate(tangents):
        spec = specs.get(k)
        if spec is not None and not isinstance(tangent, DTensor):
            tangents[k] = _tangent(tangent, spec, tuple(node._input_metadata[k].shape))
        elif tangent is None:
            output = node._input_metadata[k]
            tangents[k] = torch.zeros(output.shape, dtype=output.dtype, device=output.device)


def _tangent(plain: torch.Tensor | None, spec: Spec, shape: tuple[int, ...]) -> DTensor:
    stride = contiguous_stride(shape) if plain is None else plain.stride()
    whole = Spec.make(spec.mesh, Layout.make(spec.layout.mesh_ndim, ((),) * spec.ndim, ()), shape, stride, spec.dtype)
    layout = spec.layout.without_partial()
    if plain is not None:
        return move(_wrap(plain, whole), layout)
    zeros = whole.with_layout(layout)
    return _wrap(torch.zeros(zeros.local_shape(), dtype=spec.dtype, device=spec.mesh.device_type), zeros)


install(DTensor, _wrap)
inner_sizes_follow(DTensor)
attributes_stand_with_their_tensors()
__all__ = ["DTensor", "FromLocal", "complete_tangents", "fake_like", "homing", "layout_in", "move"]
