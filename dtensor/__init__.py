"""dtensor: a distributed tensor made for torch.compile."""

from torch.distributed.device_mesh import DeviceMesh

from . import composite as composite  # registers what is caught whole
from . import control_flow as control_flow  # registers branches and loops
from . import hooks as hooks  # registers the backend and the passes
from . import interop as interop
from . import linear_loss as linear_loss  # registers the loss of a linear layer
from . import random as random
from . import scaling as scaling  # registers what GradScaler does to gradients
from ._torch import optim_foreach_types, utils_foreach_types
from .api import distribute_module, distribute_tensor, empty, full, linspace, logspace, ones, rand, randn, zeros
from .checkpoints import Checkpoints
from .errors import (
    AgreementError,
    CheckpointError,
    InvalidInputError,
    MeshError,
    MisfitError,
    MixedTensorError,
    OperatorError,
    PassError,
    PlacementError,
    ShardingError,
    StrictError,
)
from .explanation import explain
from .exporting import export
from .fallback import fallbacks
from .invariance import implicit_replication
from .local_functions import local_map
from .mesh import init_device_mesh, prepare
from .notation import Rule
from .parallel.global_view import distribute_model
from .placements import Partial, Placement, Replicate, Shard
from .registration import register_sharding
from .strictness import strict
from .tensor import DTensor
from .torch_checkpoints import load_torch_checkpoint

__version__ = "0.1.0"

for _types in (optim_foreach_types, utils_foreach_types):
    if DTensor not in _types:
        _types.append(DTensor)

hooks.dump_from_now_on()

__all__ = [
    "AgreementError",
    "CheckpointError",
    "Checkpoints",
    "DTensor",
    "DeviceMesh",
    "InvalidInputError",
    "MeshError",
    "MisfitError",
    "MixedTensorError",
    "OperatorError",
    "Partial",
    "PassError",
    "Placement",
    "PlacementError",
    "Replicate",
    "Rule",
    "Shard",
    "ShardingError",
    "StrictError",
    "distribute_model",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "export",
    "fallbacks",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "linspace",
    "load_torch_checkpoint",
    "local_map",
    "logspace",
    "ones",
    "prepare",
    "rand",
    "randn",
    "register_sharding",
    "strict",
    "zeros",
]
