"""Readable names of process groups: the axes of their meshes."""

import torch.distributed as dist

from dtensor.job.groups import canonical
from dtensor.mesh.mesh import default_group, known_meshes
from dtensor.torch_private.core import process_groups, resolve_process_group

MESH = "mesh_"
"""The prefix of torch's description of a group that it made for a mesh axis."""


def labels() -> dict[str, str]:
    """Map names of process groups to what is printed for them: the mesh axes they span, else the name in torch's
    meshes. Groups about which nothing is known, and groups that would get the same label, are left out."""
    found: dict[str, str] = {}
    for facts in known_meshes():
        dims = facts.mesh.mesh_dim_names or ()
        for axes, name in facts.groups.items() if dims else ():
            found.setdefault(name, ",".join([dims[a] for a in axes]))
    for name, *_ in process_groups()[1] if dist.is_initialized() else ():
        if canonical(name) not in found:
            found[name] = _described(name)
    called = list(found.values())
    return {name: label for name, label in found.items() if label and called.count(label) == 1}


def _described(name: str) -> str:
    described = str(resolve_process_group(name).group_desc)
    return described.removeprefix(MESH) if described.startswith(MESH) else "world" if name == default_group() else ""


__all__ = ["labels"]
