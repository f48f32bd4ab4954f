"""Private APIs of Inductor's estimate of peak memory, by which it orders kernels. See `core`, which checks the version
of torch."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from . import core  # noqa: F401  it checks the version of torch


@functools.cache
def estimate_memory_as_generated() -> None:
    """Make Inductor estimate the peak of an order of kernels as its code will have it.

    Kernels write the parts of a concatenation straight into it, so that all of it is allocated before the first one.
    Inductor counts it when the last part is there, and until then each part as memory of its own. On a CPU, generated
    kernels that follow each other are called as one, before which everything is allocated that they write, and after
    which everything is freed; Inductor counts them one by one. So it took orders for better that are worse, with
    gradients that were put into buckets early.
    """
    from torch._inductor import memory

    sizes_of, timeline_of = memory.compute_size_for_scheduler_buffer, memory.compute_memory_timeline

    @functools.wraps(sizes_of)
    def compute_size_for_scheduler_buffer(name_to_buf: dict[str, Any]) -> dict[str, tuple[int, int]]:
        found = sizes_of(name_to_buf)
        for name, whole in _concatenations(name_to_buf.values()).items():
            if whole in found:
                found[name] = found[name][0], 0
                found[whole] = 0, found[whole][1]
        return found

    @functools.wraps(timeline_of)
    def compute_memory_timeline(nodes: list[Any], *args: Any, **kwargs: Any) -> Any:
        infos, *rest = timeline_of(nodes, *args, **kwargs)
        return _by_calls(_from_the_first_part(infos), _calls(nodes)), *rest

    memory.compute_size_for_scheduler_buffer = compute_size_for_scheduler_buffer
    memory.compute_memory_timeline = compute_memory_timeline


def _concatenations(buffers: Any) -> dict[str, str]:
    """Name of a buffer that is part of a concatenation -> name of the concatenation."""
    from torch._inductor.ir import NonOwningLayout

    found: dict[str, str] = {}
    for buffer in buffers:
        layout = getattr(getattr(buffer, "node", None), "layout", None)  # inputs have no node
        if isinstance(layout, NonOwningLayout):
            view: Any = layout.view
            found[buffer.get_name()] = view.data.data.get_name()  # of a view the storage, and what is in it
    return found


def _from_the_first_part(infos: Sequence[Any]) -> list[Any]:
    """Lifetimes of buffers, of concatenations from the first part to the last use of any part; parts take nothing."""
    whole_of = _concatenations([info.buffer for info in infos])
    spans: dict[str, list[Any]] = {}
    for info in infos:
        name: str = info.buffer.get_name()
        spans.setdefault(whole_of.get(name, name), []).append(info)
    found = list[Any]()
    for info in infos:
        name: str = info.buffer.get_name()
        if name in whole_of:
            info = replace(info, size_alloc=0, size_free=0)
        elif len(spans[name]) > 1:
            start, ends = min([i.start_step for i in spans[name]]), [i.end_step for i in spans[name]]
            end = -1 if -1 in ends else max(ends)
            info = replace(info, size_alloc=info.size_free, start_step=start, end_step=end)
        found.append(info)
    return found


def _calls(nodes: Sequence[Any]) -> list[tuple[int, int]]:
    """For each node the first and the last of those that are called with it."""
    found = list[tuple[int, int]]()
    for generated, group in groupby(nodes, _is_generated):
        first, count = len(found), len(list(group))
        last = first + count - 1
        found += [(first, last)] * count if generated else [(k, k) for k in range(first, last + 1)]
    return found


def _is_generated(node: Any) -> bool:
    """Whether it is a generated kernel for a CPU."""
    device = node.get_device()
    return device is not None and device.type == "cpu" and not (node.is_extern() or node.is_template())


def _by_calls(infos: Sequence[Any], calls: Sequence[tuple[int, int]]) -> list[Any]:
    """Lifetimes of buffers that begin before, and end after, what is called together."""
    return [
        replace(
            info,
            start_step=calls[info.start_step][0] if calls else info.start_step,
            end_step=info.end_step if info.end_step < 0 else calls[info.end_step][1],
        )
        for info in infos
    ]


__all__ = ["estimate_memory_as_generated"]
