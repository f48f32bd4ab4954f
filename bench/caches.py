"""Empty caches of compiled code, so that no figure depends on what was compiled on this machine before."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def cold_caches() -> Iterator[str]:
    """Context manager in which this process, and those it starts, cache compiled code in a new folder.

    The folder is empty at first and is removed at the end.
    """
    before = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="dtensor-bench-caches-", ignore_cleanup_errors=True) as folder:
        os.environ[VARIABLE] = folder
        try:
            yield folder
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


__all__ = ["cold_caches"]
