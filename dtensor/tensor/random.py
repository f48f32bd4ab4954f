"""Random numbers: the state of torch's generators, which must be the same on all ranks of a mesh.

A random operator on DTensors draws the numbers of the global tensor on every rank, so that each keeps its shard of what
one device would have; replicas are equal because the generators are. Nothing checks that on the way: seed all ranks
alike, with `manual_seed` or `torch.manual_seed`, and draw alike on all of them. Between pipeline stages seeds may
differ; a mesh holds the ranks of one stage. An explicit `generator=` must likewise be given on all ranks, in one state.
"""

import hashlib
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist

from ..comm.from_plain import mesh_of, of_all_ranks
from ..errors import MeshError, ShardingError


def manual_seed(seed: int, device_mesh: Any = None) -> None:
    """Seed the default generators, of the CPU and of the accelerators, of this process; as `torch.manual_seed`.

    Args:
        seed: the seed, the same on all ranks.
        device_mesh: a mesh whose ranks all call this; their seeds are compared first. None compares nothing.

    Raises:
        ValueError: on every rank of the mesh, if two of them gave different seeds.
        TypeError: the seed is no int.
        MeshError: this rank is not in the mesh.
    """
    if device_mesh is not None:
        _check_member(device_mesh, "manual_seed")
        given = dict(sorted(of_all_ranks((dist.get_rank(), seed), device_mesh)))
        if len(set(given.values())) > 1:
            raise ValueError(
                f"manual_seed got different seeds on the ranks of the mesh (rank: seed): {given}; "
                "replicas would differ. Give one seed, or a mesh that holds only the ranks that share it"
            )
    if not isinstance(seed, Integral):
        raise TypeError(f"manual_seed takes an int; got {seed!r}")
    torch.manual_seed(seed)


def check_states(device_mesh: Any) -> None:
    """Compare the states of the default generators between the ranks of a mesh; all of them have to call this.

    Raises:
        ShardingError: on every rank of the mesh, if two of them differ.
        MeshError: this rank is not in the mesh.
    """
    _check_member(device_mesh, "check_states")
    states = dict(sorted(of_all_ranks((dist.get_rank(), _digest(device_mesh.device_type)), device_mesh)))
    if len(set(states.values())) > 1:
        raise ShardingError(
            f"the generators are in different states on the ranks of the mesh (rank: digest): {states}; seed them with "
            "dtensor.random.manual_seed(seed, device_mesh), and draw random numbers alike on all ranks"
        )


def _check_member(device_mesh: Any, name: str) -> None:
    if mesh_of(device_mesh).get_coordinate() is None:
        raise MeshError(
            f"{name}: rank {dist.get_rank()} is not in {device_mesh}; call it on the ranks of the mesh only"
        )


def _digest(device_type: str) -> str:
    """Of the state of the CPU's default generator, and of the device's if it is another one."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states.append(torch.get_device_module(device_type).get_rng_state())
    return hashlib.sha256(b"".join(s.cpu().numpy().tobytes() for s in states)).hexdigest()[:12]


__all__ = ["check_states", "manual_seed"]
