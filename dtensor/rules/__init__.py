"""The sharding rules of aten operators, as tables by family. `RULES` maps an operator's name to its rule function.

For each call `dtensor.dispatch.decision` looks up the rule (`lookup`), applies it to the call (`call`, `rule`) and
chooses the cheapest layouts that it allows (`choose`).
"""

from .call import RULES, SHAPES, Call, LocalCall, Output, base_name, is_in_place
from .choose import Choice, choose, choose_as
from .families import (
    advanced_indexing,
    along_dim,
    attention,
    batch_norm,
    conv,
    embedding_and_gather,
    experts,
    linalg,
    linear_lse,
    log_softmax,
    loss,
    matmul,
    nll,
    norm,
    optimizer,
    pointwise,
    random,
    reduction,
    slices,
    spatial,
    views,
    weight_norm,
)
from .families.advanced_indexing import MASKS
from .families.replicated import WHOLE, needs_whole
from .local_calls import FOR_EMPTY
from .lookup import rule_of
from .rule import Candidate, Rule, State, candidates

FAMILIES = (
    advanced_indexing,
    along_dim,
    attention,
    batch_norm,
    conv,
    embedding_and_gather,
    experts,
    linalg,
    linear_lse,
    log_softmax,
    loss,
    matmul,
    nll,
    norm,
    optimizer,
    pointwise,
    random,
    reduction,
    slices,
    spatial,
    views,
    weight_norm,
)
"""The modules that fill `RULES` when they are imported."""

__all__ = [
    "FAMILIES",
    "FOR_EMPTY",
    "MASKS",
    "RULES",
    "SHAPES",
    "WHOLE",
    "Call",
    "Candidate",
    "Choice",
    "LocalCall",
    "Output",
    "Rule",
    "State",
    "base_name",
    "candidates",
    "choose",
    "choose_as",
    "is_in_place",
    "needs_whole",
    "rule_of",
]
