"""What process groups are called for people: by the axes of their meshes."""

import torch.distributed as dist

from dtensor.mesh.mesh import default_group, known_meshes
from dtensor.torch_private.core import process_groups, resolve_process_group

MESH = "mesh_"
"""How torch begins the description of a group that it made for an axis of a mesh."""


def labels() -> dict[str, str]:
    """Names of process groups -> what to print: the mesh axes they are over, as far as no two would be called alike;
    else what torch's meshes call them; groups of which nothing is known are not in it."""
    found: dict[str, str] = {}
    for facts in known_meshes():
        dims = facts.mesh.mesh_dim_names
        for axes, name in facts.groups.items() if dims else ():
            found.setdefault(name, ",".join([dims[a] for a in axes]))
    for name, *_ in process_groups()[1] if dist.is_initialized() else ():
        found.setdefault(name, _described(name))
    called = list(found.values())
    return {name: label for name, label in found.items() if label and called.count(label) == 1}


def _described(name: str) -> str:
    described = str(resolve_process_group(name).group_desc)
    return described.removeprefix(MESH) if described.startswith(MESH) else "world" if name == default_group() else ""


__all__ = ["labels"]
