"""dtensor: a distributed tensor subclass for PyTorch, designed for torch.compile.

Create DTensors with `distribute_tensor` or a factory such as `zeros`, or shard a model with `distribute_model`.
Importing the package registers the backend `"dtensor"` with `torch.compile` and installs its passes in Inductor.
"""

import os as _os
from pkgutil import resolve_name as _resolve_name
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from . import interop as interop
from .dispatch.fallback import fallbacks
from .dispatch.plain_operands import implicit_replication
from .dispatch.registration import register_sharding
from .dispatch.strictness import strict
from .errors import (
    AgreementError,
    ArgumentError,
    ArgumentTypeError,
    CallOrderError,
    CheckpointError,
    InvalidInputError,
    MeshError,
    MisfitError,
    MixedTensorError,
    OperatorError,
    PackageError,
    PassError,
    PlacementError,
    RecordError,
    ReplicaError,
    ShardingError,
    StrictError,
    UnsupportedError,
)
from .layout.placements import Partial, Placement, Replicate, Shard
from .mesh.by_dim import by_dim
from .mesh.mesh import init_device_mesh, prepare
from .parallel.modules.distribute_module import distribute_module
from .parallel.modules.model_methods import METHODS as _METHODS
from .parallel.training import grad_scaler as _grad_scaler  # registers the gradient operators of GradScaler
from .parallel.training import linear_cross_entropy as _linear_cross_entropy  # registers the fused linear loss
from .parallel.whole_model.distribute_model import distribute_model
from .parallel.whole_model.plan import FINDERS as _FINDERS
from .parallel.whole_model.plan import Activation, Plan
from .program import environment as _environment
from .rules.notation import Rule
from .runs.records import taps as _taps  # registers the operators by which compiled graphs are recorded
from .state import safetensors as safetensors
from .state import torch_state_dicts as _torch_state_dicts  # makes DTensors known to torch's state dicts
from .tensor import compile_hooks as _hooks  # registers the backend and the passes
from .tensor import composite_operators as _composite_operators  # registers what is caught whole
from .tensor import control_flow as _control_flow  # registers branches and loops
from .tensor import random as random
from .tensor.explain import explain
from .tensor.factories import distribute_tensor, empty, full, linspace, logspace, ones, rand, randn, zeros
from .tensor.local_map import local_map
from .tensor.tensor import DTensor
from .tensor.visualize import visualize
from .torch_private.core import optim_foreach_types as _optim_foreach_types
from .torch_private.core import utils_foreach_types as _utils_foreach_types

if TYPE_CHECKING:
    from .interop.export import export
    from .parallel.search.search import predict, search
    from .runs.records.recording import record
    from .runs.traces.trace import merge_traces, trace, trace_handler
    from .runs.watching.watch import Watch, watch
    from .state.checkpoints import Checkpoints
    from .state.pretrained import from_pretrained
    from .state.torch_checkpoints import load_torch_checkpoint
    from .testing.simulation.ranks import simulate

__version__ = "0.1.0"

if not _os.path.isdir(_os.path.join(__path__[0], "passes")):
    # A checkout without the links to compile/ and passes/, which stand beside this folder. By this path the names of
    # their files, too, begin with this folder's: they are the library's code, not the user's.
    __path__.append(_os.path.join(__path__[0], _os.pardir))

_REGISTERED = (_composite_operators, _control_flow, _grad_scaler, _linear_cross_entropy, _taps, _torch_state_dicts)
"""Modules that are imported for what they register with torch."""

_ON_DEMAND = {
    "Checkpoints": "dtensor.state.checkpoints:Checkpoints",
    "Watch": "dtensor.runs.watching.watch:Watch",
    "compile": "dtensor.compile",
    "export": "dtensor.interop.export:export",
    "from_pretrained": "dtensor.state.pretrained:from_pretrained",
    "load_torch_checkpoint": "dtensor.state.torch_checkpoints:load_torch_checkpoint",
    "merge_traces": "dtensor.runs.traces.trace:merge_traces",
    "passes": "dtensor.passes",
    "predict": "dtensor.parallel.search.search:predict",
    "record": "dtensor.runs.records.recording:record",
    "search": "dtensor.parallel.search.search:search",
    "simulate": "dtensor.testing.simulation.ranks:simulate",
    "trace": "dtensor.runs.traces.trace:trace",
    "trace_handler": "dtensor.runs.traces.trace:trace_handler",
    "watch": "dtensor.runs.watching.watch:watch",
}
"""What is imported when it is first named, and where it is: what no step of a training needs."""


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _resolve_name(_ON_DEMAND[name])
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})


for _types in (_optim_foreach_types, _utils_foreach_types):
    if DTensor not in _types:
        _types.append(DTensor)

_hooks.dump_from_now_on()
_hooks.examine_from_now_on()
_hooks.limit_from_now_on()
_hooks.load_from_now_on()
_hooks.share_from_now_on()
_hooks.tell_from_now_on()
_METHODS["save_pretrained"] = lambda save: _resolve_name("dtensor.state.pretrained:saving")(save)
_FINDERS["auto"] = lambda *given: _resolve_name(_ON_DEMAND["search"])(*given)
if _environment.setting("DTENSOR_RECORD"):
    _resolve_name("dtensor.runs.records.recording:record_if_asked")()

__all__ = [
    "Activation",
    "AgreementError",
    "ArgumentError",
    "ArgumentTypeError",
    "CallOrderError",
    "CheckpointError",
    "Checkpoints",
    "DTensor",
    "DeviceMesh",
    "InvalidInputError",
    "MeshError",
    "MisfitError",
    "MixedTensorError",
    "OperatorError",
    "PackageError",
    "Partial",
    "PassError",
    "Placement",
    "PlacementError",
    "Plan",
    "RecordError",
    "ReplicaError",
    "Replicate",
    "Rule",
    "Shard",
    "ShardingError",
    "StrictError",
    "UnsupportedError",
    "Watch",
    "by_dim",
    "distribute_model",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "export",
    "fallbacks",
    "from_pretrained",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "load_torch_checkpoint",
    "local_map",
    "logspace",
    "merge_traces",
    "ones",
    "predict",
    "prepare",
    "rand",
    "randn",
    "record",
    "register_sharding",
    "search",
    "simulate",
    "strict",
    "trace",
    "trace_handler",
    "visualize",
    "watch",
    "zeros",
]
