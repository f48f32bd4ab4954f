"""The sharding rules of aten, as tables by family. `RULES` maps an operator's name to its rule function."""

from . import attention, indexing, loss, matmul, norm, pointwise, random, reduction, views
from .call import RULES, Call, LocalCall, Output, rule_of
from .choose import Choice, choose
from .rule import Candidate, Rule, candidates

FAMILIES = (attention, indexing, loss, matmul, norm, pointwise, random, reduction, views)
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
    "rule_of",
]
