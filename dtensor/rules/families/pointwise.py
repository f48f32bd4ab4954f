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

from typing import Any

from ...torch_private.symbolic_sizes import same_size
from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..notation import LETTERS, LibraryRule, Rule, library_rule
from ..plan import signature

FIRST = """
    neg _neg_view positive clone detach alias lift_fresh conj _conj _conj_physical conj_physical polar deg2rad
    rad2deg mul.Scalar div.Tensor div.Scalar true_divide.Tensor true_divide.Scalar ldexp.Tensor
    threshold_backward gelu_backward silu_backward mish_backward elu_backward leaky_relu_backward
    hardtanh_backward hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward
    softplus_backward log_sigmoid_backward sigmoid_backward tanh_backward logit_backward _prelu_kernel_backward
    rrelu_with_noise_backward native_dropout_backward zero
"""
"""Operators (as in `LINEAR`) that are linear in their first argument."""

LINEAR: dict[str, Any] = {
    **dict.fromkeys(FIRST.split(), 0),
    "complex": ((0, 1),),
    "add.Tensor": ((0, 1),),
    "sub.Tensor": ((0, 1),),
    "rsub.Tensor": ((0, 1),),
    "mul.Tensor": (0, 1),
    "where.self": ((1, 2),),
    "lerp.Scalar": ((0, 1),),
    "lerp.Tensor": ((0, 1),),
    "masked_fill.Tensor": ((0, 2),),
    "addcmul": ((0, 1), (0, 2)),
    "addcdiv": ((0, 1),),
    "copy": ((0, 1),),
}
"""Operator (without in-place underscore, with overload where it matters) -> `linear` of its rule."""

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

UP, DOWN = (("max", "max"), ("min", "min")), (("max", "min"), ("min", "max"))

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


def elementwise(call: Call, result: str = "...") -> str:
    """The text of an operator whose arguments have the same dims, up to broadcasting, and results `result`."""
    arguments = ["..."] * len(signature(call.func).arguments)
    return f"{','.join(arguments)}->{','.join([result] * max(signature(call.func).returns, 1))}"


def broadcast_shape(shapes: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The shape that all `shapes` broadcast to."""
    full: list[Any] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for i, size in enumerate(shape, len(full) - len(shape)):
            full[i] = size if same_size(full[i], 1) else full[i]
    return tuple(full)


def linearity(call: Call) -> Any:
    """The arguments in which this call is linear."""
    name = call.name
    overload = call.func._overloadname
    if name == "_to_copy":
        return 0 if _widens(call) else ()
    if name == "masked_fill" and call["value"] == 0:
        return 0
    return LINEAR.get(f"{name}.{IN_LISTS.get(overload, overload)}", LINEAR.get(name, ()))


def kept(call: Call) -> Any:
    """The arguments that may be Partial(max), (min) or (product), and what the outputs then are; see `rule.Rule`.

    Integers wrap around, so only copies keep their order.
    """
    name = call.name
    if name in COPIES:
        return ((0, (*UP, ("product", "product"))),)
    if not all(x.dtype.is_floating_point for x in (*call.operands, *call.outputs) if x is not None):
        return ()
    if name in RISING or name == "_to_copy":
        return ((0, UP),)
    if name in FALLING:
        return ((0, DOWN),)
    if name in ("maximum", "minimum"):
        op = name[:3]
        return ((0, UP), (1, UP), ((0, 1), ((op, op),)))
    return ()  # not a sum: minus infinity, which loses on one rank, may meet infinity and be NaN


def _widens(call: Call) -> bool:
    """Whether a cast keeps every value, so that it may be applied to partial sums."""
    (x,) = call.operands
    have, to = x.dtype, call["dtype"] or x.dtype
    return have.is_floating_point and to.is_floating_point and to.itemsize >= have.itemsize


@rule_for(*POINTWISE)
def pointwise(call: Call) -> Rule:
    """All dims may be sharded, those of one place alike; partial sums stay so where the operator is linear."""
    unread = 0 if call.name in ("fill", "zero") else ()
    return library_rule(elementwise(call), linear=linearity(call), keeps=kept(call), unread=unread)


@rule_for("fake_quantize_per_channel_affine_cachemask")
def per_channel(call: Call) -> str:
    """Pointwise, with a scale and a zero point for each index along `axis`."""
    full = LETTERS[: call["self"].ndim]
    channel = full[call["axis"]]
    return f"{full},{channel},{channel}->{full},{full}"


LIKE = dict.fromkeys(["zeros_like", "ones_like", "empty_like", "full_like"], LibraryRule("...->...", unread=0))
"""Same layout as the operand, whose values are not read; for a partial operand the constant is replicated."""

rule_table(__name__, LIKE)


@rule_for("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def new(call: Call) -> Rule:
    """Same layout as the operand if it has the operand's shape, else replicated."""
    (out,) = call.outputs
    assert out is not None
    source = call["self"]
    if out.ndim == source.ndim and all(map(same_size, out.shape, source.shape)):
        local = _new_strided if call.name == "new_empty_strided" else None
        return library_rule("...->...", unread=0, local=local, shape_arg="size")
    return library_rule("*->*", unread=0)


def _new_strided(call: LocalCall) -> Any:
    """A dense local tensor whose dims are in memory in the order of the global strides."""
    shape, stride = call["size"], call.call["stride"]
    order = sorted(range(len(shape)), key=lambda i: stride[i], reverse=True)
    made = call.args[0].new_empty([shape[i] for i in order], **call.kwargs)
    return made.permute([order.index(i) for i in range(len(shape))])


TRIANGLES = dict.fromkeys(["tril", "triu"], Rule("...11->...11", linear=0))

rule_table(__name__, TRIANGLES)

__all__ = ["LIKE", "LINEAR", "POINTWISE", "TRIANGLES", "broadcast_shape", "elementwise", "kept", "linearity"]
