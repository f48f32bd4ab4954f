"""Linear algebra on batches of matrices: the batch may be sharded, a matrix may not.

Where an operator solves for the columns of a right-hand side, the columns are independent and may be sharded.
"""

from typing import Any

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..local_calls import empty_outputs, is_sharded, unless_empty
from ..notation import LibraryRule, Rule, library_rule

FACTORISATIONS: dict[str, Rule | str] = {
    "cholesky": "...11->...11",
    "cholesky_inverse": "...11->...11",
    "linalg_cholesky_ex": "...11->...11,...",
    "linalg_qr": "...11->...11,...11",
    "linalg_polar": "...11->...11,...11",
    "geqrf": "...11->...11,...1",
    "linalg_householder_product": "...11,...1->...11",
    "linalg_eig": "...11->...1,...11",
    "_linalg_eigvals": "...11->...1",
    "_linalg_eigh": "...11->...1,...11",
    "_linalg_svd": "...11->...11,...1,...11",
    "linalg_lu": "...11->...11,...11,...11",
    "linalg_lu_factor_ex": "...11->...11,...1,...",
    "lu_unpack": "...11,...1->...11,...11,...11",
    "linalg_ldl_factor_ex": "...11->...11,...1,...",
}

VALUES: dict[str, Rule | str] = {
    "_linalg_det": "...11->...,...11,...1",
    "_linalg_slogdet": "...11->...,...,...11,...1",
    "linalg_inv_ex": "...11->...11,...",
    "linalg_matrix_exp": "...11->...11",
    "linalg_matrix_sqrth": "...11->...11",
    "linalg_pinv.atol_rtol_tensor": "...11,...,...->...11",
}

SOLVERS: dict[str, Rule | str] = {
    "cholesky_solve": Rule("...1n,...11->...1n", linear=0),
    "linalg_ldl_solve": Rule("...11,...1,...1n->...1n", linear=2),
}

rule_table(__name__, {**FACTORISATIONS, **VALUES, **SOLVERS}, local=unless_empty)

CHECKS = {"_linalg_check_errors": LibraryRule("...->", whole=(0,))}

rule_table(__name__, CHECKS)

DISTANCES = {
    "_cdist_forward": LibraryRule("...p1,...r1->...pr", local=unless_empty),
    "_cdist_backward": LibraryRule("...pr,...p1,...r1,...pr->...p1", linear=0, reduce="r", local=unless_empty),
}

SUMMED_DISTANCES = {
    "_cdist_forward": LibraryRule("...pm,...rm->...pr", reduce="m", local=unless_empty),
    "_cdist_backward": LibraryRule(
        "...pr,...pm,...rm,...pr->...pm", linear=0, reduce="r", unread=3, local=unless_empty
    ),
}
"""Distances in the 1-norm: sums over the coordinates, whose gradients do not read the distances."""


@rule_for(*DISTANCES, by_value=True)
def distances(call: Call) -> Rule:
    """Distances of all pairs of points: the points of either operand may be sharded; in the 1-norm, coordinates too."""
    return (SUMMED_DISTANCES if call["p"] == 1 else DISTANCES)[call.name]


def _columns(call: Call) -> str:
    """The term of a right-hand side, of which columns or rows may be sharded."""
    return "...1n" if call["left"] else "...n1"


@rule_for("linalg_solve_triangular")
def solve_triangular(call: Call) -> Rule:
    """Solves `A X = B` or `X A = B`."""
    rhs = _columns(call)
    return library_rule(f"...11,{rhs}->{rhs}", linear=1, local=unless_empty)


@rule_for("linalg_lu_solve", "ormqr")
def solve(call: Call) -> Rule:
    """As `solve_triangular`, for a factorisation that is two tensors; `Q X` or `X Q` for a QR factorisation."""
    rhs = _columns(call)
    return library_rule(f"...11,...1,{rhs}->{rhs}", linear=2, local=unless_empty)


@rule_for("triangular_solve")
def solve_and_copy(_: Call) -> Rule:
    """As `solve_triangular`, with a copy of A as second output."""
    return library_rule("...1n,...11->...1n,...11", whole=((1, "n"),), local=_unless_no_matrix)


@rule_for("_linalg_solve_ex")
def solve_and_factors(call: Call) -> Rule:
    """As `solve_triangular`, with the factors of A as further outputs; each matrix may have one vector."""
    rhs = "...1" if _is_vector(call) else _columns(call)
    whole = () if _is_vector(call) else tuple((i, "n") for i in (1, 2, 3))
    return library_rule(f"...11,{rhs}->{rhs},...11,...1,...", whole=whole, local=_local_solve)


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


__all__ = ["CHECKS", "DISTANCES", "FACTORISATIONS", "SOLVERS", "VALUES"]
