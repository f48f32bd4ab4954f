"""Pointwise operators: every output element depends on the elements at the same (broadcast) position.

Any dim may be sharded. torch tags most of these operators (see `dtensor.rules.lookup`); `POINTWISE` lists the others.
Partial(sum) and Partial(avg) pass through the operands in which an operator is linear, which `LINEAR` lists. What it
leaves out matters as much:

    add(P, R)       refused: R would be added once per rank
    mul(P, P)       refused: a product of sums is not the sum of products
    add.Scalar(P)   refused: the scalar would be added once per rank
    relu(P)         refused: not linear

Partial(max) and Partial(min) pass through increasing and decreasing functions: relu(P(max)) is the maximum of relu of
each rank's values. A copy passes Partial with max, min or product through as well.
"""

from collections.abc import Mapping
from typing import Any

from ...torch_private.symbolic_sizes import same_size
from ..call import Call, LocalCall, rule_for
from ..rule import Dims, Rule

LINEAR: dict[str, tuple[set[int], ...]] = {
    "neg": ({0},),
    "_neg_view": ({0},),
    "positive": ({0},),
    "clone": ({0},),
    "detach": ({0},),
    "alias": ({0},),
    "lift_fresh": ({0},),
    "conj": ({0},),
    "_conj": ({0},),
    "_conj_physical": ({0},),
    "conj_physical": ({0},),
    "complex": ({0, 1},),
    "polar": ({0},),
    "deg2rad": ({0},),
    "rad2deg": ({0},),
    "add.Tensor": ({0, 1},),
    "sub.Tensor": ({0, 1},),
    "rsub.Tensor": ({0, 1},),
    "mul.Tensor": ({0}, {1}),
    "mul.Scalar": ({0},),
    "div.Tensor": ({0},),
    "div.Scalar": ({0},),
    "true_divide.Tensor": ({0},),
    "true_divide.Scalar": ({0},),
    "ldexp.Tensor": ({0},),
    "where.self": ({1, 2},),
    "lerp.Scalar": ({0, 1},),
    "lerp.Tensor": ({0, 1},),
    "masked_fill.Tensor": ({0, 2},),
    "addcmul": ({0, 1}, {0, 2}),
    "addcdiv": ({0, 1},),
    "threshold_backward": ({0},),
    "gelu_backward": ({0},),
    "silu_backward": ({0},),
    "mish_backward": ({0},),
    "elu_backward": ({0},),
    "leaky_relu_backward": ({0},),
    "hardtanh_backward": ({0},),
    "hardsigmoid_backward": ({0},),
    "hardswish_backward": ({0},),
    "hardshrink_backward": ({0},),
    "softshrink_backward": ({0},),
    "softplus_backward": ({0},),
    "log_sigmoid_backward": ({0},),
    "sigmoid_backward": ({0},),
    "tanh_backward": ({0},),
    "logit_backward": ({0},),
    "_prelu_kernel_backward": ({0},),
    "rrelu_with_noise_backward": ({0},),
    "native_dropout_backward": ({0},),
    "copy": ({0, 1},),
    "zero": ({0},),
}
"""Operator (without in-place underscore, with overload where it matters) -> sets of arguments, by position in the
schema, in which it is jointly linear."""

IN_LISTS = {"List": "Tensor", "ScalarList": "Scalar"}
"""Overload of a foreach operator -> overload of the operator that it applies to each tensor."""

RISING = frozenset(
    {
        "asinh",
        "atan",
        "ceil",
        "clamp",
        "clamp_max",
        "clamp_min",
        "deg2rad",
        "erf",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "hardsigmoid",
        "hardtanh",
        "rad2deg",
        "relu",
        "round",
        "sigmoid",
        "sinh",
        "tanh",
        "trunc",
    }
)
"""Operators that are increasing functions of operand 0, defined for every number, and NaN for NaN only. (The logarithm
is not: it may be NaN for one rank's value but not for the maximum. The sign is not: it makes 0 of NaN.) None depends on
the sign of a parameter such as a slope."""

FALLING = frozenset({"erfc", "neg"})
"""Operators that are decreasing functions of operand 0, likewise."""

UP, DOWN = {"max": "max", "min": "min"}, {"max": "min", "min": "max"}

COPIES = frozenset({"alias", "clone", "detach", "lift_fresh", "positive"})
"""Operators that return their operand unchanged. Autograd detaches what it saves, such as the result of `amax`."""

POINTWISE = [
    "_conj",
    "_dirichlet_grad",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "_add_relu",
    "_lazy_clone",
    "_neg_view",
    "_pin_memory",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "_standard_gamma_grad",
    "_to_copy",
    "absolute",
    "alias",
    "complex",
    "conj",
    "copy",
    "detach",
    "divide",
    "elu_backward",
    "fake_quantize_per_tensor_affine_cachemask",
    "fill",
    "floor_divide",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "lift_fresh",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "mish_backward",
    "multiply",
    "polar",
    "real",
    "rrelu_with_noise_backward",
    "softplus_backward",
    "softshrink_backward",
    "special_ndtr",
    "subtract",
    "zero",
]
"""Operators whose outputs have the broadcast shape of all tensor operands but that torch does not tag as pointwise."""


def broadcast(shapes: list[tuple[Any, ...]], out: tuple[Any, ...]) -> tuple[tuple[Dims, ...], dict[str, Any]]:
    """Factors of operands that broadcast to `out`, one per output dim, and the factors' sizes."""
    names = [f"d{i}" for i in range(len(out))]

    def of(shape: tuple[Any, ...]) -> Dims:
        last = names[len(out) - len(shape) :]
        full = out[len(out) - len(shape) :]
        return tuple([() if same_size(s, 1) and not same_size(o, 1) else (f,) for s, o, f in zip(shape, full, last)])

    return tuple([of(s) for s in shapes]), dict(zip(names, out))


def broadcast_shape(shapes: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The shape that all `shapes` broadcast to."""
    full: list[Any] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for i, size in enumerate(shape, len(full) - len(shape)):
            full[i] = size if same_size(full[i], 1) else full[i]
    return tuple(full)


def linearity(call: Call) -> tuple[frozenset[int], ...]:
    """The sets of operands in which this call is jointly linear."""
    name = call.name
    overload = call.func._overloadname
    keyed = LINEAR.get(f"{name}.{IN_LISTS.get(overload, overload)}", LINEAR.get(name, ()))
    if name == "_to_copy" and _widens(call):
        return (frozenset({0}),)
    if name == "masked_fill" and call["value"] == 0:
        return (frozenset({0}),)
    groups = [call.operands_at(g) for g in keyed]
    return tuple([g for g in groups if g is not None])


def kept(call: Call) -> tuple[tuple[frozenset[int], Mapping[str, str]], ...]:
    """The operands that may be Partial(max), (min) or (product), and what the outputs then are; see `Rule.keeps`.

    Integers wrap around, so only copies keep their order.
    """
    first = call.operands_at({0})
    if first is None:
        return ()
    if call.name in COPIES:
        return ((first, {**UP, "product": "product"}),)
    if not all(x.dtype.is_floating_point for x in (*call.operands, *call.outputs) if x is not None):
        return ()
    if call.name in RISING or call.name == "_to_copy":
        return ((first, UP),)
    if call.name in FALLING:
        return ((first, DOWN),)
    if call.name in ("maximum", "minimum"):
        op = call.name[:3]
        return ((first, UP), (frozenset({1}), UP), (frozenset({0, 1}), {op: op}))
    return ()  # not a sum: minus infinity, which loses on one rank, may meet infinity and be NaN


def _widens(call: Call) -> bool:
    """Whether a cast keeps every value, so that it may be applied to partial sums."""
    (x,) = call.operands
    have, to = x.dtype, call["dtype"] or x.dtype
    return have.is_floating_point and to.is_floating_point and to.itemsize >= have.itemsize


@rule_for(*POINTWISE)
def pointwise(call: Call) -> Rule:
    shapes = [o.shape for o in call.operands]
    out = next(o for o in call.outputs if o is not None)
    ins, sizes = broadcast(shapes, out.shape)
    full = tuple((f,) for f in sizes)
    outs = tuple(None if o is None else full if o.ndim == len(full) else ((),) * o.ndim for o in call.outputs)
    unread: frozenset[int] = frozenset({0} if call.name in ("fill", "zero") else ())
    return Rule(ins, outs, sizes, linear=linearity(call), keeps=kept(call), unread=unread)


@rule_for("fake_quantize_per_channel_affine_cachemask")
def per_channel(call: Call) -> Rule:
    """Pointwise, with a scale and a zero point for each index along `axis`."""
    shape = call["self"].shape
    (full,), sizes = broadcast([shape], shape)
    channel = (full[call["axis"] % len(shape)],)
    return Rule((full, channel, channel), (full, full), sizes)


@rule_for("zeros_like", "ones_like", "empty_like", "full_like")
def like(call: Call) -> Rule:
    """Same layout as the operand, whose values are not read; for a partial operand the constant is replicated."""
    shape = call["self"].shape
    ins, sizes = broadcast([shape], shape)
    return Rule(ins, ins, sizes, unread=frozenset({0}))


@rule_for("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def new(call: Call) -> Rule:
    """Same layout as the operand if it has the operand's shape, else replicated."""
    (out,) = call.outputs
    assert out is not None
    source = call["self"]
    if out.ndim == source.ndim and all(map(same_size, out.shape, source.shape)):
        ins, sizes = broadcast([source.shape], source.shape)
        local = _new_strided if call.name == "new_empty_strided" else None
        return Rule(ins, ins, sizes, unread=frozenset({0}), local=local, shape_arg="size")
    nothing: Dims = ((),) * out.ndim
    return Rule((((),) * source.ndim,), (nothing,), {}, unread=frozenset({0}))


def _new_strided(call: LocalCall) -> Any:
    """A dense local tensor whose dims are in memory in the order of the global strides."""
    shape, stride = call["size"], call.call["stride"]
    order = sorted(range(len(shape)), key=lambda i: stride[i], reverse=True)
    made = call.args[0].new_empty([shape[i] for i in order], **call.kwargs)
    return made.permute([order.index(i) for i in range(len(shape))])


@rule_for("tril", "triu")
def triangle(call: Call) -> Rule:
    shape = call["self"].shape
    ins, sizes = broadcast([shape], shape)
    last = frozenset(f"d{i}" for i in range(len(shape) - 2, len(shape)))
    return Rule(ins, ins, sizes, linear=(frozenset({0}),), blocked=last)


__all__ = ["LINEAR", "POINTWISE", "broadcast", "broadcast_shape", "kept", "linearity"]
