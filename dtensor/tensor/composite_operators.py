"""Composite operators that are intercepted before torch decomposes them.

DTensor carries a dispatch key above autograd, and the operators registered here are intercepted on it. Each one would
lose something in torch's decomposition:

- The math path of attention creates its causal mask as a plain tensor and merges batch with heads.
- The gradients of an embedding's table, and of weight and bias of group and instance norm, depend on how the parameter
  is sharded, which the derivative formula does not receive.
- RMS norm works in place on a mean that may be partial.
- Embedding bags and recurrent layers are kernels that take full tensors, but they can be written in operators that
  take shards.
- A few others create constants, which are accepted inside a region (see `dtensor.dispatch.plain_operands`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.from_plain import is_tracing
from ..dispatch import strictness
from ..dispatch.decision import functional_of, has_out
from ..dispatch.dispatch import dispatch
from ..dispatch.global_view import check_global
from ..dispatch.implicit_moves import moves_of
from ..dispatch.out_variants import put
from ..dispatch.plain_operands import is_alike, region_of_torch
from ..errors import StrictError
from ..layout.layout import Layout
from ..layout.placements import Partial, Placement, Replicate, Shard
from ..mesh.local_sizes import divides
from ..mesh.tensor_spec import contiguous_stride
from ..rules.families.random import keep_shard
from ..torch_private.core import OpOverload, intercept, meets_only_autograd, never_traced, tree_map, without_own_key
from ..torch_private.symbolic_sizes import same_size
from .tensor import DTensor, homing

aten: Any = torch.ops.aten


class _Inside(threading.local):
    name: str = ""


inside: _Inside = _Inside()
"""The `name` of the operator this thread is running, if that operator redistributes operands itself; for `explain`."""


def _moving(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that records in `inside` that the function runs the operator called `name`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, inside.name = inside.name, name
            try:
                return function(*args, **kwargs)
            finally:
                inside.name = before

        return run

    return decorate


@_moving("scaled_dot_product_attention")
def attention_math(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Any = None,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """The math path of scaled_dot_product_attention as one operator on local tensors.

    Batch and head dims stay sharded; sequence and feature dims are gathered first. Torch's decomposition would merge
    batch and heads into one dim, which can only stay sharded over batch.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
    mesh = next(x.device_mesh for x in given.values() if isinstance(x, DTensor))
    query, key, value, attn_mask = (_distributed(x, name, mesh) for name, x in given.items())
    target = _kept(query, key, value)
    if strictness.active():
        layouts = [Layout.of(tuple(target), query.dim())] * 3
        if attn_mask is not None:
            layouts.append(Layout.of(tuple(_mask_placements(attn_mask, target, query.dim())), attn_mask.dim()))
        tensors = zip(given, (query, key, value, attn_mask))
        operands = [(name, t._spec) for name, t in tensors if t is not None]
        strictness.check_moves("scaled_dot_product_attention", moves_of(operands, layouts))
    q, k, v = (t.redistribute(placements=target).to_local() for t in (query, key, value))
    mask = None if attn_mask is None else _local_mask(attn_mask, target, query.dim())
    batch = query.shape[:-2]
    if not enable_gqa:
        batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])
    shapes = ((*batch, query.shape[-2], value.shape[-1]), (*batch, query.shape[-2], key.shape[-2]))
    if dropout_p > 0 and dropout_mask is None:
        layout = Layout.of(tuple(target), len(batch) + 2)
        scores = torch.empty(shapes[1], device=query.device)
        dropout_mask = keep_shard(scores.bernoulli_(1 - dropout_p), layout, mesh).to(torch.bool)
    out = aten._scaled_dot_product_attention_math(
        q, k, v, mask, dropout_p, is_causal, dropout_mask, scale=scale, enable_gqa=enable_gqa
    )
    return tuple(DTensor.from_local(t, mesh, target, shape=s, stride=contiguous_stride(s)) for t, s in zip(out, shapes))


def _distributed(x: Any, name: str, mesh: DeviceMesh) -> Any:
    """The argument as a DTensor. A plain tensor that is the same on all ranks counts as replicated."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        return x
    check_global("scaled_dot_product_attention", name, x, mesh)
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim)


def _kept(query: DTensor, key: DTensor, value: DTensor) -> list[Placement]:
    """Placements while the math path runs. Batch and heads stay sharded where query, key and value split the same."""
    kept: list[Placement] = []
    parts = [1] * query.dim()
    for axis, p in enumerate(query.placements):
        stays = False
        if isinstance(p, Shard) and p.dim < query.dim() - 2 and query.dim() == key.dim() == value.dim():
            n = parts[p.dim] * query.device_mesh.size(axis)
            first, *others = (t.shape[p.dim] for t in (query, key, value))
            stays = all(same_size(x, first) for x in others) or all(divides(n, x) for x in (first, *others))
            parts[p.dim] = n if stays else parts[p.dim]
        kept.append(p if stays else Replicate())
    return kept


def _mask_placements(mask: DTensor, target: list[Placement], ndim: int) -> list[Placement]:
    """Placements of a mask that broadcasts over leading dims, for scores placed as `target`."""
    missing = ndim - mask.dim()
    return [
        Shard(p.dim - missing, p.cut)
        if isinstance(p, Shard) and p.dim >= missing and mask.shape[p.dim - missing] != 1
        else Replicate()
        for p in target
    ]


def _local_mask(mask: DTensor, target: list[Placement], ndim: int) -> torch.Tensor:
    """This rank's shard of a mask."""
    wanted = _mask_placements(mask, target, ndim)
    partial = [Partial() if isinstance(p, Shard) and not isinstance(w, Shard) else w for p, w in zip(target, wanted)]
    return mask.redistribute(placements=wanted).to_local(grad_placements=partial)


def attention(*args: Any, **kwargs: Any) -> Any:
    """Attention, decomposed by torch. The decomposition creates a plain result if an operand has no elements."""
    args, kwargs = tree_map(_autocast, (args, kwargs))  # whose key lies below the one that this runs at
    empty = any(isinstance(x, DTensor) and 0 in x.shape for x in (*args, *kwargs.values()))
    with region_of_torch() if empty else contextlib.nullcontext():
        return aten.scaled_dot_product_attention.default.decompose(*args, **kwargs)


def _autocast(x: Any) -> Any:
    """`x` in the dtype that autocast passes to an operator it runs in lower precision."""
    if not isinstance(x, torch.Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.is_floating_point() and x.dtype != torch.float64 else x


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, indices: Any, padding_idx: Any, scale_grad_by_freq: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.rest = weight.shape[0], padding_idx, scale_grad_by_freq
        ctx.layout = weight._spec.layout.without_partial().text
        return aten.embedding(weight, indices, padding_idx, scale_grad_by_freq, False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None
        made = aten.embedding_dense_backward(grad, *ctx.saved_tensors, *ctx.rest)
        if not (made.__class__ is DTensor and made._spec.layout.text == ctx.layout):
            made = torch.ops.dtensor.redistribute(made, ctx.layout, False)
        return made, None, None, None


_EMBEDDING = aten.embedding.default


@never_traced
def embedding(
    weight: Any, indices: Any, padding_idx: Any = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Embedding whose gradient has the layout of its table."""
    if type(weight) is type(indices) is DTensor and not weight.requires_grad and meets_only_autograd():
        # Autograd would record nothing, so go straight to dispatch.
        return dispatch(_EMBEDDING, (), (weight, indices, padding_idx, scale_grad_by_freq, sparse))
    with without_own_key():
        if sparse or not isinstance(weight, DTensor) or not isinstance(indices, DTensor):
            return aten.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
        return _Embedding.apply(weight, indices, padding_idx, scale_grad_by_freq)


def _homing(x: Any) -> Any:
    """`x`, with a gradient that arrives in the layout of `x` and is not partial."""
    if not isinstance(x, DTensor) or not x.requires_grad or not torch.is_grad_enabled():
        return x
    return homing(x, "this norm's weight or bias")


def _norm(operator: OpOverload, weight: int) -> Any:
    """A norm whose weight (the argument at index `weight`) and bias (the next one) get gradients in their own layout.

    These gradients are small, one number per feature. If they stayed partial, they would be all-reduced every time an
    optimizer reads them.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        places = (weight, weight + 1)
        given = [_homing(a) if i in places else a for i, a in enumerate(args)]
        named = {name: _homing(a) if name in ("weight", "bias") else a for name, a in kwargs.items()}
        with without_own_key():
            return operator(*given, **named)

    return kernel


for _name, _place in {"group_norm": 2, "instance_norm": 1}.items():
    intercept(_name, _norm(getattr(aten, _name), _place))


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """RMS norm. If a normalised dim is sharded, or the input partial, it runs as operators that reduce over the ranks.

    Torch's decomposition has an in-place operator on the mean, which is not possible on a partial mean.
    """
    ndim = len(normalized_shape)
    weight = _homing(weight)
    layout = x._spec.layout if isinstance(x, DTensor) else None
    if layout is None or not (layout.partial or any(layout.dims[len(layout.dims) - ndim :])):
        with without_own_key():
            return aten.rms_norm(x, normalized_shape, weight, eps)
    operands = [("input", x._spec)] + ([("weight", weight._spec)] if isinstance(weight, DTensor) else [])
    try:
        return _rms_norm_by_parts(x, ndim, weight, eps)
    except StrictError as error:
        raise strictness.within("rms_norm", operands, error) from error


def _rms_norm_by_parts(x: Any, ndim: int, weight: Any, eps: Any) -> Any:
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    mean = wide.pow(2).mean(list(range(-ndim, 0)), keepdim=True)
    scaled = wide * (mean + eps).rsqrt()
    return (scaled if weight is None else scaled * weight).to(x.dtype)


def tensor_split(x: Any, tensor_indices_or_sections: Any, dim: int = 0) -> Any:
    """`tensor_split` at indices given as a tensor, whose values torch reads directly from memory."""
    given = tensor_indices_or_sections
    if strictness.active() and isinstance(given, DTensor):
        target = Layout.make(given.device_mesh.ndim, ((),) * given.dim(), ())
        strictness.check_moves("tensor_split", moves_of([("tensor_indices_or_sections", given._spec)], [target]))
    whole = given.full_tensor() if isinstance(given, DTensor) else given
    return torch.tensor_split(x, whole.tolist(), dim)


def one_hot(x: Any, num_classes: Any = -1) -> Any:
    """One-hot encoding that raises on invalid classes in eager mode, as torch does for plain tensors.

    On a tensor subclass torch's own encodes an invalid class as zeros. In a graph torch checks no values, and neither
    does this.
    """
    with without_own_key(), region_of_torch():
        made = aten.one_hot(x, num_classes)
    if isinstance(x, DTensor) and not is_tracing(x):
        legal: dict[str, Any] = {"non-negative": x >= 0}
        if num_classes != -1:
            legal["smaller than num_classes"] = x < num_classes
        for text, found in legal.items():
            aten._assert_async.msg(found.to_local().all(), f"Class values must be {text}; num_classes is {num_classes}")
    return made


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Any:
    """Sums and means of bags as an embedding, whose table may be sharded, and a sum of its rows per bag.

    This materialises one row per index, which torch's kernel does not. Torch's kernel needs full tensors: it runs if
    all operands are replicated, for maxima, for sparse gradients and with `scale_grad_by_freq`.
    """
    offsets = _of_sizes(offsets, indices)
    given = (weight, indices, offsets, per_sample_weights)
    if mode == 2 or sparse or scale_grad_by_freq or not any(map(_is_cut, given)):
        options = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
        with without_own_key(), region_of_torch():
            return aten.embedding_bag.padding_idx(weight, indices, offsets, *options)
    with region_of_torch():
        count, bags = indices.shape[0], offsets.shape[0] - include_last_offset
        places = torch.arange(count, device=weight.device, dtype=offsets.dtype)
        bag = torch.bucketize(places, offsets[:bags], right=True) - 1
        try:
            rows = torch.embedding(weight, indices)
        except IndexError as error:  # for bags torch raises another class
            raise RuntimeError(f"embedding_bag: {error}") from None
        sizes = torch.ones(count, device=weight.device, dtype=weight.dtype)
        if padding_idx is not None:
            kept = indices != padding_idx % weight.shape[0]
            rows, sizes = rows * kept[:, None], sizes * kept
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[:, None]
        made = torch.zeros(bags, weight.shape[1], device=weight.device, dtype=weight.dtype).index_add(0, bag, rows)
        sizes = torch.zeros(bags, device=weight.device, dtype=weight.dtype).index_add(0, bag, sizes)
        if mode == 1:
            made = made / sizes.clamp(min=1)[:, None]
        return made, bag, sizes.to(offsets.dtype), torch.zeros_like(offsets)


def _of_sizes(offsets: Any, indices: Any) -> Any:
    """Offsets, as a replicated DTensor if all bags have one length: such offsets follow from the sizes alone."""
    if isinstance(offsets, DTensor) or not isinstance(indices, DTensor) or is_tracing(indices) or is_alike(offsets):
        return offsets
    count, bags = indices.shape[0], offsets.shape[0]
    if not bags or count % bags or not torch.equal(offsets, torch.arange(0, count, count // bags).to(offsets)):
        return offsets
    return DTensor.from_local(offsets, indices.device_mesh, [Replicate()] * indices.device_mesh.ndim)


def _is_cut(x: Any) -> bool:
    return isinstance(x, DTensor) and not x._spec.layout.is_replicated


def lstm(operator: OpOverload) -> Any:
    """An LSTM step by step, as torch computes it without oneDNN; the oneDNN kernel takes full tensors."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_own_key(), region_of_torch(), torch.backends.mkldnn.flags(enabled=False):
            return operator(*args, **kwargs)

    return kernel


IN_REGION = ("combinations", "linalg_matrix_power", "linalg_matrix_rank", "matrix_power", "nanquantile", "quantile")
"""Composites that create plain tensors from sizes and numbers and combine them with their operands."""


OUT = ("matmul",)
"""Composites whose out= form writes to tensors of another shape. Those of `IN_REGION` would leave `out` unwritten."""


def _whole(operator: OpOverload) -> Any:
    """`operator` inside a region. An out= form runs the functional form and copies the result into `out`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_own_key(), region_of_torch():
            return operator(*args, **kwargs)

    def into(*args: Any, out: Any, **kwargs: Any) -> Any:
        with without_own_key(), region_of_torch():
            put(operator, "out", out, functional_of(operator)(*args, **kwargs))
            return out

    return into if has_out(operator) else kernel


def _overloads(names: tuple[str, ...]) -> list[Any]:
    return [getattr(getattr(aten, name), overload) for name in names for overload in getattr(aten, name).overloads()]


for _operator in [*_overloads(IN_REGION), *filter(has_out, _overloads(OUT))]:
    intercept(str(_operator).removeprefix("aten.").removesuffix(".default"), _whole(_operator))


intercept("one_hot", one_hot)
intercept("rms_norm", rms_norm)
intercept("tensor_split.tensor_indices_or_sections", tensor_split)
intercept("scaled_dot_product_attention", attention)
intercept("_scaled_dot_product_attention_math", attention_math)
intercept("embedding", embedding)
intercept("embedding_bag", embedding_bag)
intercept("embedding_bag.padding_idx", embedding_bag)
intercept("lstm.input", lstm(aten.lstm.input))
intercept("lstm.data", lstm(aten.lstm.data))

__all__ = ["attention_math", "embedding", "inside", "rms_norm"]
