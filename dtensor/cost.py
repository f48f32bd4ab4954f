"""Cost of a redistribution step: alpha-beta, seconds from bytes and ranks.

    time = alpha * rounds + bytes on the wire per rank / bandwidth

with ring collectives (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005): all_gather and reduce_scatter send (n-1)/n of the full buffer in n-1 rounds, all_reduce twice that, all_to_all
(n-1)/n of the local buffer. `shard` and `partial` send nothing and cost a copy. Nothing here differs between ranks.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What a wire and a memory cost.

    Attributes:
        alpha: seconds per message round.
        bandwidth: bytes per second on the wire.
        memory: bytes per second of a local copy.
        launch: seconds to start a local copy.
    """

    alpha: float = 10e-6
    bandwidth: float = 10e9
    memory: float = 100e9
    launch: float = 1e-6


DEFAULT = Link()


def wire_bytes(op: str, size: float, n: int) -> float:
    """Bytes each rank sends in `op` over `n` ranks.

    `size` in bytes: the gathered result of all_gather, the input of every other operator.
    """
    share = (n - 1) / n
    return {
        "all_gather": share * size,
        "reduce_scatter": share * size,
        "all_reduce": 2 * share * size,
        "all_to_all": share * size,
    }.get(op, 0.0)


def seconds(op: str, size: float, n: int, link: Link = DEFAULT) -> float:
    """Estimated time of `op` over `n` ranks; `size` as in `wire_bytes`."""
    if n == 1:
        return 0.0
    rounds = {
        "all_gather": n - 1,
        "reduce_scatter": n - 1,
        "all_reduce": 2 * (n - 1),
        "all_to_all": n - 1,
    }.get(op)
    if rounds is None:
        return link.launch + size / link.memory
    return link.alpha * rounds + wire_bytes(op, size, n) / link.bandwidth


__all__ = ["DEFAULT", "Link", "seconds", "wire_bytes"]
