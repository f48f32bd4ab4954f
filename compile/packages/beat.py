"""Tells the ranks that wait for one that compiles whether it does anything: one that hangs would hold all others."""

import threading
import time
from types import TracebackType
from typing import Any

from dtensor.torch_private.core import cloned_store
from dtensor.torch_private.phases import COMPILING, current

PULSE = 1.0
"""Seconds between two signs."""

WORK = 0.01
"""Seconds of the processor's time that a thread must have used between two signs to count as working."""


class Beat:
    """A context in which the calling thread compiles, and a value in the store grows as long as that goes on.

    It grows while the thread uses the processor, and while it waits for kernels, which other processes build.

    Args:
        store: the job's store.
        key: of the value.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store: Any = store
        self._key: str = key
        self._stop: threading.Event = threading.Event()
        self._compilation: Any = current()
        self._clock: int | None = None
        self._thread: threading.Thread = threading.Thread(target=self._tell, name="dtensor compiling", daemon=True)

    def __enter__(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _tell(self) -> None:
        used, beats, store = self._used(), 0, None
        while not self._stop.wait(PULSE):
            before, used = used, self._used()
            builds = self._compilation is not None and self._compilation.phase == COMPILING
            if used - before > WORK or builds:
                beats += 1
                try:
                    store = store or cloned_store(self._store)
                    store.set(self._key, str(beats))
                except RuntimeError:
                    return  # the store is gone

    def _used(self) -> float:
        """Seconds of the processor's time that the thread has used; where that is unknown, of the clock."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)


__all__ = ["PULSE", "Beat"]
