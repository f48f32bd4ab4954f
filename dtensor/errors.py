"""The errors a user can meet. Each message says what was given, why it cannot be, and what to write instead."""


class ShardingError(RuntimeError):
    """A distributed operation cannot be carried out as asked."""


class MeshError(ShardingError):
    """Tensors of one operation live on different device meshes."""


class MixedTensorError(ShardingError):
    """A plain tensor and a DTensor were given to one operation."""


class PlacementError(ShardingError, ValueError):
    """Placements do not fit the mesh or the tensor."""


class MisfitError(ShardingError):
    """The code of a model and the plan that it was parallelized by do not fit. Raised in eager mode; where a graph is
    traced, torch's error says the same."""


class OperatorError(ShardingError, NotImplementedError):
    """An operator cannot run on these DTensors."""


class StrictReason(ShardingError):
    """Under `dtensor.strict()` an operator would do what the user did not write.

    Attributes:
        reason: what it would do.
        axes: the mesh axes over which it would communicate.
    """

    def __init__(self, message: str, reason: str = "", axes: frozenset[int] = frozenset()):
        super().__init__(message)
        self.reason = reason
        self.axes = axes


class StrictError(StrictReason, OperatorError):
    """Strict mode in eager code."""


class StrictTraceError(StrictReason):
    """Strict mode while a graph is traced. No OperatorError: on a NotImplementedError Dynamo would give the function up
    and go on without compiling it."""


class PassError(ShardingError):
    """A pass left a graph that is not valid, or that computes something else."""


class InvalidInputError(PassError):
    """A graph does not verify before any pass has touched it."""


class AgreementError(ShardingError):
    """Ranks run different collectives on a group that they share, or a rank for which others would wait failed or left.

    Every rank of the job raises it."""


class CheckpointError(ShardingError):
    """A checkpoint is missing, damaged, or holds something else than was asked for."""


__all__ = [
    "AgreementError",
    "CheckpointError",
    "InvalidInputError",
    "MeshError",
    "MisfitError",
    "MixedTensorError",
    "OperatorError",
    "PassError",
    "PlacementError",
    "ShardingError",
    "StrictError",
    "StrictReason",
    "StrictTraceError",
]
