"""The matmul family: einsums whose contracted factor reduces to Partial(sum)."""

from .call import Call, LocalCall, rule_for
from .local import empty_outputs
from .pattern import Pattern, bind
from .rule import Rule, dims

EINSUMS = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "ger": ("m", "n", "mn"),
    "addbmm": ("bmk", "bkn", "mn"),
    "_int_mm": ("mk", "kn", "mn"),
}
"""Operator -> factors of both operands and of the result."""

ADDED = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "addbmm": "addbmm", "addr": "ger"}
"""Operator -> the product it adds its first operand to."""


@rule_for(*(name for name in EINSUMS if name not in ADDED))
def product(call: Call) -> Rule:
    a, b, out = EINSUMS[call.name]
    x, y = call.operands
    sizes = {**dict(zip(a, x.shape)), **dict(zip(b, y.shape))}
    return Rule((dims(a), dims(b)), (dims(out),), sizes, reduce={"k": "sum"}, linear=(frozenset({0}), frozenset({1})))


@rule_for(*ADDED)
def added_product(call: Call) -> Rule:
    """`beta * input + alpha * (a @ b)`: where the contracted factor is sharded the input must be partial too."""
    a, b, out = EINSUMS[ADDED[call.name]]
    bias, x, y = call.operands
    sizes = {**dict(zip(a, x.shape)), **dict(zip(b, y.shape))}
    full = [sizes[f] for f in out]
    own = [
        "1" if isinstance(s, int) and s == 1 and not (isinstance(o, int) and o == 1) else f
        for f, s, o in zip(out[len(out) - bias.ndim :], bias.shape, full[len(out) - bias.ndim :])
    ]
    return Rule(
        (dims(own), dims(a), dims(b)),
        (dims(out),),
        sizes,
        reduce={f: "sum" for f in a + b if f not in out},
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        addends=frozenset({0}),
        local=_no_rows_is_empty if call.name == "addmv" and tuple(bias.shape) != tuple(full) else None,
    )


def _no_rows_is_empty(call: LocalCall):
    """For a matrix without rows the kernel returns the input as it is, not broadcast."""
    return call.run() if call["mat"].shape[0] else empty_outputs(call)


@rule_for("_scaled_mm")
def scaled_mm(call: Call) -> Rule:
    """`mm` of 8-bit numbers with a scale for each tensor, or for each row of the first and column of the second.

    The contracted factor is whole: parts would each be rounded to the few bits of the result.
    """
    text = "m_, _n, ~, ~, ~, ~ -> mn"
    if call["scale_a"].shape and call["scale_a"].shape[0] == call["self"].shape[0]:
        text = "m_, _n, m_, _n, n, ~ -> mn"
    return bind(Pattern(text), call)


__all__ = ["EINSUMS"]
