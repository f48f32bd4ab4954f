"""dtensor: a distributed tensor subclass for PyTorch, designed for torch.compile.

Create DTensors with `distribute_tensor` or a factory such as `zeros`, or shard a model with `distribute_model`.
Importing the package registers the backend `"dtensor"` with `torch.compile` and installs its passes in Inductor.
"""

from pkgutil import resolve_name
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
from .mesh import environment as environment
from .mesh.mesh import init_device_mesh, prepare
from .parallel.modules.distribute_module import distribute_module
from .parallel.modules.model_methods import METHODS
from .parallel.training import grad_scaler as grad_scaler  # registers the gradient operators of GradScaler
from .parallel.training import linear_cross_entropy as linear_cross_entropy  # registers the fused linear loss
from .parallel.whole_model.distribute_model import distribute_model
from .parallel.whole_model.plan import FINDERS, Activation, Plan
from .rules.notation import Rule
from .runs.records import taps as taps  # registers the operators by which compiled graphs are recorded
from .state import safetensors as safetensors
from .state import torch_state_dicts as torch_state_dicts  # makes DTensors known to torch's state dicts
from .tensor import compile_hooks as hooks  # registers the backend and the passes
from .tensor import composite_operators as composite_operators  # registers what is caught whole
from .tensor import control_flow as control_flow  # registers branches and loops
from .tensor import random as random
from .tensor.explain import explain
from .tensor.factories import distribute_tensor, empty, full, linspace, logspace, ones, rand, randn, zeros
from .tensor.local_map import local_map
from .tensor.tensor import DTensor
from .tensor.visualize import visualize
from .torch_private.core import optim_foreach_types, utils_foreach_types

if TYPE_CHECKING:
    from .interop.export import export
    from .parallel.search.search import predict, search
    from .runs.records.recorder import record
    from .runs.traces.trace import merge_traces, trace, trace_handler
    from .runs.watching.watch import Watch, watch
    from .state.checkpoints import Checkpoints
    from .state.pretrained import from_pretrained
    from .state.torch_checkpoints import load_torch_checkpoint
    from .testing.simulation.ranks import simulate

__version__ = "0.1.0"

ON_DEMAND = {
    "Checkpoints": "dtensor.state.checkpoints:Checkpoints",
    "Watch": "dtensor.runs.watching.watch:Watch",
    "compile": "dtensor.compile",
    "export": "dtensor.interop.export:export",
    "from_pretrained": "dtensor.state.pretrained:from_pretrained",
    "load_torch_checkpoint": "dtensor.state.torch_checkpoints:load_torch_checkpoint",
    "merge_traces": "dtensor.runs.traces.trace:merge_traces",
    "passes": "dtensor.passes",
    "predict": "dtensor.parallel.search.search:predict",
    "record": "dtensor.runs.records.recorder:record",
    "search": "dtensor.parallel.search.search:search",
    "simulate": "dtensor.testing.simulation.ranks:simulate",
    "trace": "dtensor.runs.traces.trace:trace",
    "trace_handler": "dtensor.runs.traces.trace:trace_handler",
    "watch": "dtensor.runs.watching.watch:watch",
}
"""What is imported when it is first named, and where it is: what no step of a training needs."""


def __getattr__(name: str) -> Any:
    if name not in ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = resolve_name(ON_DEMAND[name])
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *ON_DEMAND})


for _types in (optim_foreach_types, utils_foreach_types):
    if DTensor not in _types:
        _types.append(DTensor)

hooks.dump_from_now_on()
hooks.examine_from_now_on()
hooks.limit_from_now_on()
hooks.load_from_now_on()
hooks.share_from_now_on()
hooks.tell_from_now_on()
METHODS["save_pretrained"] = lambda save: resolve_name("dtensor.state.pretrained:saving")(save)
FINDERS["auto"] = lambda *given: resolve_name(ON_DEMAND["search"])(*given)
if environment.setting("DTENSOR_RECORD"):
    resolve_name("dtensor.runs.records.recorder:record_if_asked")()

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
