"""For which ranks of a job compiled code holds: for all, for those with shards as long, or for one."""

import types
from collections.abc import Sequence

import torch.distributed as dist

from dtensor.job.groups import group_rank, group_size
from dtensor.layout.chunks import Lengths, chunk_length
from dtensor.torch_private.core import names_of_this_rank

RANKS = {"get_rank", "get_node_local_rank", "get_local_rank", "get_group_rank", "get_coordinate", "group_rank", "rank"}
RANKS |= {"environ", "getenv"}
"""Names by which a program asks for its rank. Dynamo puts the answer into the graph, without a guard."""


def asks_for_rank(code: types.CodeType) -> bool:
    """Whether code, or code inside it, may ask for the rank of its process."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return not RANKS.isdisjoint(code.co_names) or any(map(asks_for_rank, inner))


def group_of_this_rank(sources: Sequence[str]) -> str:
    """A group in generated code that has another name on other ranks; "" if there is none."""
    calls = [line for source in sources for line in source.splitlines() if "torch.ops." in line]
    return next((name for name in names_of_this_rank() if any(f"'{name}'" in line for line in calls)), "")


def uneven_lengths(noted: Lengths, for_this_rank: bool = False) -> tuple[tuple[tuple[int, str, int], ...], int | None]:
    """For which ranks a trace holds: (length, group, part) of each length that was split unevenly, and the global rank
    if it holds for no other, as where it says so."""
    foreign = {"", *names_of_this_rank()}
    if for_this_rank or any(group in foreign for _, group in noted):
        return (), dist.get_rank() if dist.is_initialized() else 0
    return tuple([(*key, part) for key, part in sorted(noted.items())]), None


def other_part(lengths: tuple[tuple[int, str, int], ...], only: int | None) -> str:
    """Why what was compiled for these parts, or on this rank only, does not hold for this one, in words; "" if it does.
    Its meshes exist here."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if only not in (None, rank):
        return f"it depends on the rank, and was compiled on rank {only}, not on rank {rank}"
    for size, group, part in lengths:
        here = chunk_length(size, group_size(group), group_rank(group))
        if here != part:
            return f"its shards are uneven: {size} over {group}, of which it was compiled for {part}, not for {here}"
    return ""


__all__ = ["asks_for_rank", "group_of_this_rank", "other_part", "uneven_lengths"]
