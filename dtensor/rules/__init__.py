"""The sharding rules of aten, as tables by family. `RULES` maps an operator's name to its rule function."""

from . import (
    along,
    attention,
    batch_norm,
    conv,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    reduction,
    spatial,
    views,
)
from .call import RULES, Call, LocalCall, Output, is_in_place
from .choose import Choice, choose
from .lookup import rule_of
from .rule import Candidate, Rule, candidates

FAMILIES = (
    along,
    attention,
    batch_norm,
    conv,
    indexing,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    reduction,
    spatial,
    views,
)
"""The modules whose import fills `RULES`."""

__all__ = [
    "FAMILIES",
    "RULES",
    "Call",
    "Candidate",
    "Choice",
    "LocalCall",
    "Output",
    "Rule",
    "candidates",
    "choose",
    "is_in_place",
    "rule_of",
]
