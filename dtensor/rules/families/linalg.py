"""Linear algebra on batches of matrices: the batch may be sharded, a matrix may not.

Where an operator solves for the columns of a right-hand side, the columns are independent and may be sharded.
"""

from typing import Any

from ..call import Call, LocalCall, rule_for
from ..local_calls import empty_outputs, is_sharded
from ..pattern import Pattern, bind, pattern_rules
from ..rule import Rule

FACTORISATIONS: dict[str, Pattern | str] = {
    "cholesky": "*__ -> *__",
    "cholesky_inverse": "*__ -> *__",
    "linalg_cholesky_ex": "*__ -> *__, *",
    "linalg_qr": "*__ -> *__, *__",
    "linalg_polar": "*__ -> *__, *__",
    "geqrf": "*__ -> *__, *_",
    "linalg_householder_product": "*__, *_ -> *__",
    "linalg_eig": "*__ -> *_, *__",
    "_linalg_eigvals": "*__ -> *_",
    "_linalg_eigh": "*__ -> *_, *__",
    "_linalg_svd": "*__ -> *__, *_, *__",
    "linalg_lu": "*__ -> *__, *__, *__",
    "linalg_lu_factor_ex": "*__ -> *__, *_, *",
    "lu_unpack": "*__, *_ -> *__, *__, *__",
    "linalg_ldl_factor_ex": "*__ -> *__, *_, *",
}

VALUES: dict[str, Pattern | str] = {
    "_linalg_det": "*__ -> *, *__, *_",
    "_linalg_slogdet": "*__ -> *, *, *__, *_",
    "linalg_inv_ex": "*__ -> *__, *",
    "linalg_matrix_exp": "*__ -> *__",
    "linalg_matrix_sqrth": "*__ -> *__",
    "linalg_pinv.atol_rtol_tensor": "*__, *, * -> *__",
    "_linalg_check_errors": Pattern("* ->", local=None),
}

SOLVERS: dict[str, Pattern | str] = {
    "cholesky_solve": Pattern("*_n, *__ -> *_n", linear=({0},)),
    "linalg_ldl_solve": Pattern("*__, *_, *_n -> *_n", linear=({2},)),
}

DISTANCES = {
    "_cdist_forward": Pattern("*p_, *r_ -> *pr"),
    "_cdist_backward": Pattern("*pr, *p_, *r_, *pr -> *p_", linear=({0},), reduce={"r": "sum"}),
}

SUMMED_DISTANCES = {
    "_cdist_forward": Pattern("*pm, *rm -> *pr", reduce={"m": "sum"}),
    "_cdist_backward": Pattern("*pr, *pm, *rm, *pr -> *pm", linear=({0},), reduce={"r": "sum"}, unread=(3,)),
}
"""Distances in the 1-norm: sums over the coordinates, whose gradients do not read the distances."""

pattern_rules({**FACTORISATIONS, **VALUES, **SOLVERS})


@rule_for(*DISTANCES, by_value=True)
def distances(call: Call) -> Rule:
    """Distances of all pairs of points: the points of either operand may be sharded; in the 1-norm, coordinates too."""
    return bind((SUMMED_DISTANCES if call["p"] == 1 else DISTANCES)[call.name], call)


@rule_for("linalg_lu_solve", "linalg_solve_triangular")
def solve(call: Call) -> Rule:
    """Solves `A X = B` or `X A = B`; the columns or rows of B may be sharded."""
    rhs = "*_n" if call["left"] else "*n_"
    text = f"*__, {rhs} -> {rhs}" if call.name == "linalg_solve_triangular" else f"*__, *_, {rhs} -> {rhs}"
    return bind(Pattern(text, linear=({text.count(",")},)), call)


@rule_for("ormqr")
def multiply(call: Call) -> Rule:
    """`Q X` or `X Q`, with the Q of a QR factorisation."""
    other = "*_n" if call["left"] else "*n_"
    return bind(Pattern(f"*__, *_, {other} -> {other}", linear=({2},)), call)


@rule_for("triangular_solve")
def solve_and_copy(call: Call) -> Rule:
    """As `solve`, with a copy of A as second output."""
    return bind(Pattern("*_n, *__ -> *_n, *__", whole=((1, "n"),), local=_unless_no_matrix), call)


@rule_for("_linalg_solve_ex")
def solve_and_factors(call: Call) -> Rule:
    """As `solve`, with the factors of A as further outputs; the right-hand side may be one vector per matrix."""
    rhs = "*_" if _is_vector(call) else "*_n" if call["left"] else "*n_"
    whole = tuple((i, "n") for i in (1, 2, 3))
    return bind(Pattern(f"*__, {rhs} -> {rhs}, *__, *_, *", whole=whole, local=_local_solve), call)


def _is_vector(call: Call) -> bool:
    """Whether the right-hand side is one vector per matrix, which its shape decides."""
    a, b = call["A"], call["B"]
    return b.ndim == 1 or (b.ndim == a.ndim - 1 and tuple(b.shape) == tuple(a.shape[:-1]))


def _local_solve(call: LocalCall) -> Any:
    """As `_unless_no_matrix`, with a dim for the batch, without which some columns may have the shape of vectors."""
    a, b = call["A"], call["B"]
    if is_sharded(call) and not a.numel():
        return empty_outputs(call)
    has_no_batch = b.dim() == a.dim() - 1 and not _is_vector(call.call)
    return call.run(B=b.unsqueeze(0)) if has_no_batch else call.run()


def _unless_no_matrix(call: LocalCall) -> Any:
    """Run unless A is empty; a rank that has no column to solve for still has to compute the factors of A."""
    return empty_outputs(call) if is_sharded(call) and not call["A"].numel() else call.run()


__all__ = ["DISTANCES", "FACTORISATIONS", "SOLVERS", "VALUES"]
