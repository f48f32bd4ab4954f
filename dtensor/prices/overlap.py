"""What compiled steps hold and send at once, as the passes order them and the search expects."""

ROOM = 10
"""A bucket is full when its bytes take this many times as long as the start of a collective."""

HELD = 2
"""Parameters that are gathered at once, one in use and one prefetched. The last ones stay until the backward."""

__all__ = ["HELD", "ROOM"]
