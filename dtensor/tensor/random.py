"""Random numbers: seeding and checking torch's generators, whose state must be the same on all ranks of a mesh.

A random operator on DTensors draws the numbers of the global tensor on every rank, and each rank keeps its shard, so
the result is the one of a single device. Replicas are equal because the generators are. Operators do not check this:
use the same seed on all ranks, with `manual_seed` or `torch.manual_seed`, and draw the same numbers on all of them.
Seeds may differ between pipeline stages, as a mesh holds the ranks of one stage. An explicit `generator=` must also be
given on all ranks, in the same state.
"""

import hashlib
from numbers import Integral

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.from_plain import mesh_of, of_all_ranks
from ..errors import AgreementError, ArgumentTypeError, MeshError, ShardingError, shown


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seeds the default generators of this process, on CPU and accelerators, like `torch.manual_seed`.

    Args:
        seed: the seed, the same on all ranks.
        device_mesh: a mesh whose ranks all make this call; their seeds are compared first. None skips the comparison.

    Raises:
        AgreementError: two ranks of the mesh passed different seeds; raised on every rank of the mesh.
        TypeError: the seed is not an int.
        MeshError: this rank is not in the mesh.
    """
    if device_mesh is not None:
        _check_member(device_mesh, "manual_seed")
        given = dict(sorted(of_all_ranks((dist.get_rank(), seed), device_mesh)))
        if len(set(given.values())) > 1:
            raise AgreementError(
                f"manual_seed got different seeds on the ranks of the mesh (rank: seed): {given}; "
                "replicas would differ. Give one seed, or a mesh that holds only the ranks that share it"
            )
    if not isinstance(seed, Integral):
        raise ArgumentTypeError(f"manual_seed takes an int; got {shown(seed)}, write manual_seed(0, mesh)")
    torch.manual_seed(seed)


def check_states(device_mesh: DeviceMesh) -> None:
    """Checks that the default generators are in the same state on all ranks of a mesh. All of them must call this.

    Args:
        device_mesh: the mesh. The CPU generator is compared, and that of the mesh's device type if it is another one.

    Raises:
        ShardingError: two ranks are in different states; raised on every rank of the mesh.
        MeshError: this rank is not in the mesh.
    """
    _check_member(device_mesh, "check_states")
    states = dict(sorted(of_all_ranks((dist.get_rank(), _digest(device_mesh.device_type)), device_mesh)))
    if len(set(states.values())) > 1:
        raise ShardingError(
            f"the generators are in different states on the ranks of the mesh (rank: digest): {states}; seed them with "
            "dtensor.random.manual_seed(seed, device_mesh), and draw the same random numbers on all ranks"
        )


def _check_member(device_mesh: DeviceMesh, name: str) -> None:
    if mesh_of(device_mesh).get_coordinate() is None:
        raise MeshError(
            f"{name}: rank {dist.get_rank()} is not in {device_mesh}; call it on the ranks of the mesh only"
        )


def _digest(device_type: str) -> str:
    """A digest of the state of the default CPU generator, and of the device's generator if it is not the CPU."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states.append(torch.get_device_module(device_type).get_rng_state())
    return hashlib.sha256(b"".join(s.cpu().numpy().tobytes() for s in states)).hexdigest()[:12]


__all__ = ["check_states", "manual_seed"]
