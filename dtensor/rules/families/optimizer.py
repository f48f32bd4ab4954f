"""Fused optimizer steps: pointwise in the parameter, its gradient and its state.

The operators take lists, but these rules see one index at a time, as for foreach operators. The parameter and its state
keep their layouts; the gradient is redistributed to the parameter's.
"""

from typing import Any

from ..bind import rule_for
from ..call import Call
from ..notation import Rule, library_rule
from .pointwise import elementwise

FUSED: dict[str, Any] = {
    "_fused_adam": ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "_fused_adamw": ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"),
    "_fused_sgd": ("momentum_buffer_list",),
    "_fused_adagrad": ("state_sums",),
}
"""Operator -> the arguments that hold the parameter's state, to which it writes."""


@rule_for(*FUSED)
def fused_step(call: Call) -> Rule:
    """Parameter, gradient and states are sharded alike; the states are written."""
    return library_rule(elementwise(call), written=tuple([name for name in FUSED[call.name] if call[name]]))


__all__ = ["FUSED"]
