"""The links that a case runs on: loopback, then two namespaces joined by one that is made slow."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from . import namespaces
from .namespaces import End
from .ranks import on_ranks

LOOPBACK = "loopback"
RATES = ("1gbit", "100mbit")
"""The slow links, in tc's notation."""


def on_links(
    links: tuple[str, ...], fn: Callable[..., Any], nproc: int, *args: Any, timeout: float = 1800.0
) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Call `fn(rank, *args, links, end)` by `on_ranks`, once for loopback and once for the slow links.

    Yields:
        The links, the result of the first rank, and ""; or the links, None, and why there are no slow links here.

    Raises:
        RanksFailed: a rank failed, or was not done in time.
    """
    slow = tuple([link for link in links if link != LOOPBACK])
    if LOOPBACK in links:
        yield (LOOPBACK,), on_ranks(fn, nproc, *args, (LOOPBACK,), timeout=timeout), ""
    if slow and (without := namespaces.why_not()):
        yield slow, None, without
    elif slow:
        with namespaces.joined() as ends:
            yield slow, on_ranks(fn, nproc, *args, slow, ends=ends, timeout=timeout), ""


def each(links: tuple[str, ...], end: End | None) -> Iterator[str]:
    """Yield each link once this rank's end sends at its rate. All ranks call it."""
    for link in links:
        if end is not None and link != LOOPBACK and dist.get_rank() in (0, dist.get_world_size() // 2):
            namespaces.limit(end, link)
        yield link


__all__ = ["LOOPBACK", "RATES", "each", "on_links"]
