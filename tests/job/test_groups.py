"""Names of process groups."""

from dtensor import init_device_mesh
from dtensor.job.groups import group_rank
from dtensor.mesh.mesh import facts
from dtensor.testing import run_threads
from dtensor.torch_private.core import is_registered, names_of_this_rank, resolve_process_group


def groups_of_two_meshes(rank):
    """Two meshes with an axis over the same ranks, looked up twice in turn."""
    meshes = [init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (2, 1, 2))]
    for _ in range(2):
        found = [facts(mesh).groups[(0,)] for mesh in meshes]
    groups = [resolve_process_group(name) for name in found]
    own = [group is mesh.get_group(0) and is_registered(group) for group, mesh in zip(groups, meshes)]
    return found, own, [group_rank(name) for name in found], len(names_of_this_rank()) > 0


def test_each_group_has_a_name_of_its_own_where_threads_are_ranks():
    """Torch keeps the groups of threads elsewhere than those of processes."""
    for rank, found in enumerate(run_threads(groups_of_two_meshes, 4)):
        assert found == (["mesh.0", "mesh.0.2"], [True, True], [rank // 2] * 2, True)
