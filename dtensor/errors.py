"""The exceptions that users of the library can see.

Each message states what was given, why it does not work, and what to write instead, and is the same on all ranks
(`shown`); `tests/mistakes` has what they say. It is written where the error is raised: of `MixedTensorError` in
`dtensor.dispatch.plain_operands`, of `PlacementError` in `dtensor.layout.placements`, of `MisfitError` in
`dtensor.parallel.checks.size_misfit`, of `AgreementError` in `dtensor.comm.agreement`, of `CheckpointError` in
`dtensor.state`, and of `ReplicaError` in `dtensor.runs.watching.differences`.
"""

from typing import Any

LONGEST = 100
"""As many characters of a value a message quotes."""


class ShardingError(RuntimeError):
    """A distributed operation cannot be carried out as requested. Base class of the exceptions below."""


class ArgumentError(ShardingError, ValueError):
    """A call was given something that it cannot take. The message names the argument and what to write instead."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that the call cannot take, such as a class where an instance belongs."""


class CallOrderError(ShardingError):
    """A call comes twice, or too early or too late: a model is parallelized a second time, or a recorder is in use."""


class UnsupportedError(ShardingError, NotImplementedError):
    """What was asked for makes sense, but the library does not do it."""


class MeshError(ShardingError):
    """A device mesh is missing or unsuitable, or the tensors of one operation are on different meshes."""


class RecordError(ShardingError, ValueError):
    """A record of a run cannot be read."""


class MixedTensorError(ShardingError):
    """One operation received both a plain tensor and a DTensor."""


class PlacementError(ArgumentError):
    """Placements do not fit the mesh or the tensor."""


class MisfitError(ShardingError):
    """The code of a model does not work with the plan that it was parallelized by."""


class OperatorError(UnsupportedError):
    """An operator cannot run on these DTensors."""


class StrictError(ShardingError):
    """Under `dtensor.strict()`, an operator would do something that the user did not write.

    Attributes:
        reason: What the operator would do.
        axes: The mesh axes over which it would communicate.
    """

    def __init__(self, message: str, reason: str = "", axes: frozenset[int] = frozenset()):
        super().__init__(message)
        self.reason = reason
        self.axes = axes


class PassError(ShardingError):
    """A pass produced a graph that is invalid or that computes something else."""


class InvalidInputError(PassError):
    """A graph is invalid before any pass has changed it."""


class AgreementError(ShardingError):
    """Ranks run different collectives on a shared group, or a rank that others would wait for has failed or left.

    Every rank of the job raises it.
    """


class CheckpointError(ShardingError):
    """A checkpoint is missing or damaged, or does not contain what was requested."""


class PackageError(ShardingError):
    """A package of compiled code is missing, damaged, or not safe to load; or with `strict`, it does not fit."""


class ReplicaError(ShardingError):
    """Ranks that should hold the same parameters, optimizer state or random generators do not.

    Every rank that compares raises it, with the same text.
    """


def shown(x: Any) -> str:
    """`x` in a message: short, and the same on every rank, so without values of tensors and addresses."""
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{_a(type(x).__name__)} of shape {list(x.shape)}"
    if type(x) in (list, tuple, set) and len(x) < 4:
        inside = ", ".join(map(shown, x)) + ("," if type(x) is tuple and len(x) == 1 else "")
        return f"[{inside}]" if type(x) is list else f"({inside})" if type(x) is tuple else f"{{{inside}}}"
    if callable(x) and hasattr(x, "__qualname__"):
        return f"the function {x.__qualname__}"
    said = repr(x)
    return said if len(said) < LONGEST and "\n" not in said and " at 0x" not in said else _a(type(x).__name__)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"


__all__ = [
    "AgreementError",
    "ArgumentError",
    "ArgumentTypeError",
    "CallOrderError",
    "CheckpointError",
    "InvalidInputError",
    "MeshError",
    "MisfitError",
    "MixedTensorError",
    "OperatorError",
    "PackageError",
    "PassError",
    "PlacementError",
    "RecordError",
    "ReplicaError",
    "ShardingError",
    "StrictError",
    "UnsupportedError",
    "shown",
]
