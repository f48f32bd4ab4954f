"""Operators that run along dims: softmax, scans, sorting, Fourier transforms. All other dims may stay sharded."""

from typing import Any

from ..bind import rule_for, rule_table
from ..call import Call
from ..local_calls import unless_empty
from ..notation import LETTERS, Rule, library_rule
from ..plan import signature

ALONG: dict[str, tuple[str, Any]] = {
    "_softmax": ("dim", ()),
    "_safe_softmax": ("dim", ()),
    "_softmax_backward_data": ("dim", 0),
    "cumsum": ("dim", 0),
    "cumprod": ("dim", ()),
    "cummax": ("dim", ()),
    "cummin": ("dim", ()),
    "logcumsumexp": ("dim", ()),
    "sort": ("dim", ()),
    "argsort": ("dim", ()),
    "topk": ("dim", ()),
    "flip": ("dims", 0),
    "roll": ("dims", 0),
    "rot90": ("dims", 0),
    "glu": ("dim", ()),
    "glu_backward": ("dim", 0),
    "linalg_cross": ("dim", (0, 1)),
    "_fft_c2c": ("dim", 0),
    "_fft_r2c": ("dim", 0),
    "_fft_c2r": ("dim", 0),
}
"""Operator -> the argument that names the dims it runs along, and `linear` of its rule."""


@rule_for(*ALONG)
def along(call: Call) -> Rule:
    """The dims that the operator runs along may have another length in each tensor; the others broadcast."""
    argument, linear = ALONG[call.name]
    ndim = max(o.ndim for o in call.operands)
    given = call[argument]
    given = given if isinstance(given, (list, tuple)) else [given]
    over = {d % ndim for d in given} if given and ndim else set(range(ndim))
    full = "".join(["1" if d in over else LETTERS[d] for d in range(ndim)])
    ins = ",".join([full[ndim - o.ndim :] for o in call.operands])
    outs = ",".join([full] * signature(call.func).returns)
    return library_rule(f"{ins}->{outs}", linear=linear, local=unless_empty if call.name.startswith("_fft") else None)


SEARCHED = {
    "bucketize.Tensor": "...,1->...",
    "bucketize.Scalar": "1->",
    "isin.Tensor_Tensor": "...,*->...",
    "isin.Tensor_Scalar": "...->...",
    "isin.Scalar_Tensor": "*->",
}
"""Operators that search for values in other tensors."""

rule_table(__name__, SEARCHED)


@rule_for("searchsorted")
def searchsorted(call: Call) -> str:
    """Each row of values is searched for in a row of numbers, or all in one row."""
    if call.func._overloadname == "Scalar":
        return "*,*->"
    return "...1,...v,...1->...v" if call["self"].ndim else "*,,*->"


@rule_for("renorm")
def renorm(call: Call) -> str:
    """Each slice along `dim` is scaled by its own norm, so only that dim may be sharded."""
    ndim = call["self"].ndim
    dim = call["dim"] % ndim
    text = "1" * dim + "d" + "1" * (ndim - dim - 1)
    return f"{text}->{text}"


__all__ = ["ALONG", "SEARCHED"]
