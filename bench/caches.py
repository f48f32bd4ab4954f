"""Caches of compiled code that begin empty, so that no figure depends on what was compiled here before."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def cold_caches() -> Iterator[str]:
    """Context in which this process, and those it starts, keep compiled code in an empty folder, which goes at the
    end."""
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
