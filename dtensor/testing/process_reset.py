"""Restores the state of a process, so that a process that has run one job can run another.

A job leaves caches, settings and process groups behind. `Beginning` saves the settings. `Beginning.restore` restores
them, discards what was compiled, and reports what it cannot undo; a process with such remains is not reused.
"""

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..dispatch.fallback import fallbacks
from ..job.job import leave
from ..mesh.caches import clear_caches
from ..torch_private.compiling import compiler_settings, set_compiler_settings
from ..torch_private.dynamo import forget_compiled


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _set_path(folders: list[str]) -> None:
    sys.path[:] = folders


def _set_arguments(arguments: list[str]) -> None:
    sys.argv[:] = arguments


def _set_precision(precision: str) -> None:
    """Setting it to what it is would not leave all as it is: torch 2.15 remembers that it was set."""
    if precision != torch.get_float32_matmul_precision():
        torch.set_float32_matmul_precision(precision)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "environment": (lambda: dict(os.environ), _set_environment),
    "working directory": (os.getcwd, os.chdir),
    "sys.path": (lambda: list(sys.path), _set_path),
    "sys.argv": (lambda: list(sys.argv), _set_arguments),
    "random": (random.getstate, random.setstate),
    "numpy.random": (np.random.get_state, np.random.set_state),
    "torch's generator": (torch.get_rng_state, torch.set_rng_state),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (lambda: None, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "matmul precision": (torch.get_float32_matmul_precision, _set_precision),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the compilers' settings": (compiler_settings, set_compiler_settings),
}
"""Setting to restore -> the functions that read and write it."""

IDLE = ("ThreadPoolExecutor", "tqdm_monitor", "dtensor progress")
"""Prefixes of the names of threads that may remain, as they wait and do not touch data of a job: Inductor's workers,
Dynamo's progress bar, what tells of stages that take long."""

ENDING = 3.0
"""Seconds that the remaining threads have to notice that their process group is gone, and to end."""


def _collect() -> None:
    """Free garbage, and exclude the live objects from later collections: the some hundred thousand objects of imported
    modules would take half a second each time."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Make Python collect garbage less often; it would take a fifteenth of the time of a test that compiles."""
    gc.set_threshold(5_000, 20, 20)


class Beginning:
    """The settings of this process at the time when the object is made."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {name: read() for name, (read, _) in SETTINGS.items()}
        self.threads: set[threading.Thread] = set(threading.enumerate())
        _collect()
        collect_seldom()

    def restore(self) -> str:
        """Leave the process group, discard what was compiled, and restore the settings.

        Returns:
            A description of what could not be undone; "" if nothing remains.
        """
        leave()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_compiled()
        clear_caches()
        fallbacks(reset=True)
        for name, (_, write) in SETTINGS.items():
            write(self.settings[name])
        _collect()
        left = [t for t in threading.enumerate() if t not in self.threads and not t.name.startswith(IDLE)]
        deadline = time.monotonic() + ENDING
        for thread in left:
            thread.join(max(0.0, deadline - time.monotonic()))
        names = [t.name for t in left if t.is_alive()]
        return f"threads {', '.join(names)}" if names else ""


__all__ = ["Beginning", "collect_seldom"]
