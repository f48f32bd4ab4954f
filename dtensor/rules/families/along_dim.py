"""Operators that run along dims: softmax, scans, sorting, Fourier transforms. All other dims may stay sharded."""

from ..call import Call, rule_for
from ..local_calls import unless_empty
from ..pattern import Pattern, pattern_rules
from ..rule import Dims, Rule
from .pointwise import broadcast, broadcast_shape

ALONG: dict[str, tuple[str, tuple[set[int], ...]]] = {
    "_softmax": ("dim", ()),
    "_safe_softmax": ("dim", ()),
    "_softmax_backward_data": ("dim", ({0},)),
    "cumsum": ("dim", ({0},)),
    "cumprod": ("dim", ()),
    "cummax": ("dim", ()),
    "cummin": ("dim", ()),
    "logcumsumexp": ("dim", ()),
    "sort": ("dim", ()),
    "argsort": ("dim", ()),
    "topk": ("dim", ()),
    "flip": ("dims", ({0},)),
    "roll": ("dims", ({0},)),
    "rot90": ("dims", ({0},)),
    "glu": ("dim", ()),
    "glu_backward": ("dim", ({0},)),
    "linalg_cross": ("dim", ({0}, {1})),
    "_fft_c2c": ("dim", ({0},)),
    "_fft_r2c": ("dim", ({0},)),
    "_fft_c2r": ("dim", ({0},)),
}
"""Operator -> the argument that names the dims it runs along, and the sets of operands it is linear in."""


@rule_for(*ALONG)
def along(call: Call) -> Rule:
    """The dims that the operator runs along may have another length in each tensor; the others broadcast."""
    argument, linear = ALONG[call.name]
    ndim = max(o.ndim for o in call.operands)
    given = call[argument]
    given = given if isinstance(given, (list, tuple)) else [given]
    over = {d % ndim for d in given} if given and ndim else set(range(ndim))
    shapes = [o.shape for o in (*call.operands, *call.outputs) if o is not None]
    factors, sizes = broadcast(shapes, broadcast_shape(shapes))
    factors = [_without(d, over, ndim) for d in factors]
    ins, outs = factors[: len(call.operands)], iter(factors[len(call.operands) :])
    kept = {f: s for f, s in sizes.items() if int(f[1:]) not in over}
    return Rule(
        tuple(ins),
        tuple(None if o is None else next(outs) for o in call.outputs),
        kept,
        linear=tuple(map(frozenset, linear)),
        local=unless_empty if call.name.startswith("_fft") else None,
    )


def _without(dims: Dims, over: set[int], ndim: int) -> Dims:
    return tuple(() if i in over else d for i, d in enumerate(dims, ndim - len(dims)))


SEARCHED = {
    "searchsorted.Tensor": Pattern("*_, *v, *_ -> *v", local=None),
    "bucketize.Tensor": Pattern("*, _ -> *", local=None),
    "isin.Tensor_Tensor": Pattern("*, ~ -> *", local=None),
    "isin.Tensor_Scalar": Pattern("* -> *", local=None),
}
"""Operators that search for values in other tensors."""

pattern_rules(SEARCHED)


@rule_for("renorm")
def renorm(call: Call) -> Rule:
    """Each slice along `dim` is scaled by its own norm, so only that dim may be sharded."""
    shape = call["self"].shape
    kept = call["dim"] % len(shape)
    dims: Dims = tuple((f"d{i}",) if i == kept else () for i in range(len(shape)))
    return Rule((dims,), (dims,), {f"d{kept}": shape[kept]})


__all__ = ["ALONG", "SEARCHED"]
