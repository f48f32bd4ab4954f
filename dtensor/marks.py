"""What dispatch leaves in the nodes of a traced graph for those who read it later: keys of `fx.Node.meta`."""

LOCAL = "dtensor_local"
"""The node is the local tensor of a computed DTensor: this rank's part, whatever it was computed from."""

OPERATOR = "dtensor_operator"
"""The node is an operator that was called on DTensors, with its numbers as they were given: the same on all ranks."""

__all__ = ["LOCAL", "OPERATOR"]
