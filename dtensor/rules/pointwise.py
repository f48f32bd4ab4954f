"""Pointwise operators: every output element depends on the elements at the same (broadcast) place.

Any dimension may be sharded. Which operands an operator is linear in decides where Partial(sum) and Partial(avg) pass
through; refused rows are as much part of the table as the others:

    add(P, R)       refused: R would be added once per rank
    mul(P, P)       refused: a product of sums is not the sum of products
    add.Scalar(P)   refused: the scalar would be added once per rank
    relu(P)         refused: not linear
"""

from .call import Call, LocalCall, rule_for
from .rule import Dims, Rule

LINEAR: dict[str, tuple[set[int], ...]] = {
    "neg": ({0},),
    "positive": ({0},),
    "clone": ({0},),
    "detach": ({0},),
    "alias": ({0},),
    "lift_fresh": ({0},),
    "conj": ({0},),
    "add.Tensor": ({0, 1},),
    "sub.Tensor": ({0, 1},),
    "mul.Tensor": ({0}, {1}),
    "mul.Scalar": ({0},),
    "div.Tensor": ({0},),
    "div.Scalar": ({0},),
    "where.self": ({1, 2},),
    "lerp.Scalar": ({0, 1},),
    "addcmul": ({0, 1}, {0, 2}),
    "addcdiv": ({0, 1},),
    "threshold_backward": ({0},),
    "gelu_backward": ({0},),
    "silu_backward": ({0},),
    "sigmoid_backward": ({0},),
    "tanh_backward": ({0},),
    "native_dropout_backward": ({0},),
    "copy": ({0, 1},),
}
"""Operator (without the in-place underscore, with overload where it matters) -> sets of tensor arguments in which it is
jointly linear."""

POINTWISE = [
    "_dirichlet_grad",
    "_standard_gamma_grad",
    "abs",
    "absolute",
    "acos",
    "acosh",
    "add",
    "addcdiv",
    "addcmul",
    "alias",
    "angle",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "clone",
    "conj",
    "copy",
    "copysign",
    "cos",
    "cosh",
    "deg2rad",
    "detach",
    "digamma",
    "div",
    "divide",
    "elu",
    "elu_backward",
    "eq",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fill",
    "floor",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "ge",
    "gelu",
    "gelu_backward",
    "gt",
    "hardsigmoid",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh",
    "hardtanh_backward",
    "hypot",
    "i0",
    "igamma",
    "igammac",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "ldexp",
    "le",
    "leaky_relu",
    "leaky_relu_backward",
    "lerp",
    "lgamma",
    "lift_fresh",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logaddexp2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "logit_backward",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mish",
    "mish_backward",
    "mse_loss_pointwise",
    "mul",
    "multiply",
    "mvlgamma",
    "nan_to_num",
    "native_dropout_backward",
    "ne",
    "neg",
    "nextafter",
    "polygamma",
    "positive",
    "pow",
    "prelu_kernel",
    "rad2deg",
    "real",
    "reciprocal",
    "relu",
    "relu6",
    "remainder",
    "round",
    "rsqrt",
    "rsub",
    "sigmoid",
    "sigmoid_backward",
    "sign",
    "signbit",
    "silu",
    "silu_backward",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softplus_backward",
    "softshrink",
    "sqrt",
    "square",
    "sub",
    "subtract",
    "tan",
    "tanh",
    "tanh_backward",
    "threshold",
    "threshold_backward",
    "true_divide",
    "trunc",
    "where",
    "xlogy",
    "zero",
    "_to_copy",
]
"""Operators whose output has the broadcast shape of all tensor operands."""


def broadcast(shapes: list[tuple], out: tuple) -> tuple[tuple[Dims, ...], dict]:
    """Factors of operands that broadcast to `out`, and the factors' sizes: one factor per output dimension."""
    names = [f"d{i}" for i in range(len(out))]

    def of(shape: tuple) -> Dims:
        last = names[len(out) - len(shape) :]
        full = out[len(out) - len(shape) :]
        return tuple([() if _is_one(s) and not _is_one(o) else (f,) for s, o, f in zip(shape, full, last)])

    return tuple([of(s) for s in shapes]), dict(zip(names, out))


def _is_one(size) -> bool:
    return isinstance(size, int) and size == 1


def linearity(call: Call) -> tuple[frozenset[int], ...]:
    """The sets of operands in which this call is jointly linear."""
    name = call.func._schema.name.split("::")[1]
    name = name.removeprefix("_foreach_").removesuffix("_")
    keyed = LINEAR.get(f"{name}.{call.func._overloadname}", LINEAR.get(name, ()))
    if call.has("rounding_mode") and call["rounding_mode"] is not None:
        return ()
    if name == "_to_copy" and _widens(call):
        return (frozenset({0}),)
    if name == "masked_fill" and call.func._overloadname == "Scalar" and call["value"] == 0:
        return (frozenset({0}),)
    groups = [call.operands_at(g) for g in keyed]
    return tuple([g for g in groups if g is not None])


def _widens(call: Call) -> bool:
    """Whether a cast keeps every value, so that casting parts of a sum is casting the sum."""
    have = call.operands[0].dtype
    to = call["dtype"] or have
    return have.is_floating_point and to.is_floating_point and to.itemsize >= have.itemsize


@rule_for(*POINTWISE)
def pointwise(call: Call) -> Rule:
    shapes = [o.shape for o in call.operands]
    out = next(o for o in call.outputs if o is not None)
    ins, sizes = broadcast(shapes, out.shape)
    full = tuple((f,) for f in sizes)
    unread = frozenset({0}) if call.func._schema.name in _OVERWRITES else frozenset()
    return Rule(ins, (full,) * len(call.outputs), sizes, linear=linearity(call), unread=unread)


_OVERWRITES = ("aten::fill_", "aten::zero_", "aten::fill", "aten::zero")


@rule_for("zeros_like", "ones_like", "empty_like", "full_like")
def like(call: Call) -> Rule:
    """Same layout as the operand, whose values are not read; a constant on partial parts is a replicated constant."""
    ins, sizes = broadcast([call.operands[0].shape], call.operands[0].shape)
    return Rule(ins, ins, sizes, unread=frozenset({0}))


@rule_for("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def new(call: Call) -> Rule:
    """Laid out as the operand if it has the operand's shape, else replicated."""
    (out,) = call.outputs
    assert out is not None
    source = call.operands[0]
    if tuple(out.shape) == tuple(source.shape):
        ins, sizes = broadcast([source.shape], source.shape)
        local = _new_strided if call.func._schema.name == "aten::new_empty_strided" else None
        return Rule(ins, ins, sizes, unread=frozenset({0}), local=local, shape_arg="size")
    nothing: Dims = ((),) * out.ndim
    return Rule((((),) * source.ndim,), (nothing,), {}, unread=frozenset({0}))


def _new_strided(call: LocalCall):
    """Dense, with the dimensions in memory in the order of the global strides."""
    shape, stride = call["size"], call.call["stride"]
    order = sorted(range(len(shape)), key=lambda i: stride[i], reverse=True)
    made = call.args[0].new_empty([shape[i] for i in order], **call.kwargs)
    return made.permute([order.index(i) for i in range(len(shape))])


@rule_for("tril", "triu")
def triangle(call: Call) -> Rule:
    shape = call.operands[0].shape
    ins, sizes = broadcast([shape], shape)
    last = frozenset(f"d{i}" for i in range(len(shape) - 2, len(shape)))
    return Rule(ins, ins, sizes, linear=(frozenset({0}),), blocked=last)


__all__ = ["LINEAR", "POINTWISE", "broadcast", "linearity"]
