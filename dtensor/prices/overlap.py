"""What compiled steps hold and send at once, as the passes order them and the search expects."""

ROOM = 10
"""A bucket is full when its bytes take this many times as long as the start of a collective."""

PATIENCE = 4
"""A bucket waits for a collective that is ready later only while the bytes it already holds take no longer than this
many times the start of a collective. They may otherwise be the data that is still in flight when nothing is left to
compute."""

HELD = 2
"""Parameters that are gathered at once, one in use and one prefetched. The last ones stay until the backward."""


def joins(waiting: float, size: float, fixed: float, per_byte: float, *, later: bool) -> bool:
    """Whether a bucket has room for one more collective.

    Args:
        waiting: bytes that the bucket holds.
        size: bytes of the collective.
        fixed: seconds to start it, whatever its size.
        per_byte: seconds per byte.
        later: whether it is ready later than what the bucket holds.
    """
    return (waiting + size) * per_byte <= ROOM * fixed and not (later and waiting * per_byte > PATIENCE * fixed)


__all__ = ["HELD", "PATIENCE", "ROOM", "joins"]
