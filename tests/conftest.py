"""What tests of all folders share."""

import contextlib
import gc
import logging
import math
import os

gc.disable()  # until all is imported: little of that is garbage, and a sixth of the time went by looking

import pytest
import torch

from dtensor import init_device_mesh
from dtensor.testing import fake_ranks, kept_ranks
from dtensor.testing.process_reset import collect_seldom
from dtensor.torch_private.compiling import TRACE_LOG, compile_quickly

compile_quickly()
os.environ["DTENSOR_LINKS"] = ""  # what was measured on the machine that tests is not to change plans


def pytest_collection_finish(session):
    """What the tests have imported stays, so the garbage collector need not look at it."""
    gc.enable()
    gc.collect()
    gc.freeze()
    collect_seldom()
    let_loggers_propagate()


def let_loggers_propagate():
    """pytest adds its handlers to each logger that does not, around each test. Torch has sixty, and one of them makes
    it write out each graph, in several ways, if there is a handler."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.propagate = True
            if name == TRACE_LOG:
                logger.parent = None  # these records are no text
            else:
                logger.handlers.clear()  # that of "torch" writes to the same place


@pytest.fixture(scope="session", autouse=True)
def processes_are_kept():
    """`run_ranks` and `with_ranks` use their processes again; a test that needs new ones says `fresh=True`."""
    with kept_ranks():
        yield


@pytest.fixture
def fake_mesh():
    """`fake_mesh(2, 2)` is a mesh of which only rank 0 exists; `names` names its axes. Compiled code is forgotten."""
    with contextlib.ExitStack() as stack:

        def make(*shape, names=None):
            stack.enter_context(fake_ranks(math.prod(shape)))
            return init_device_mesh("cpu", shape, mesh_dim_names=names)

        torch.compiler.reset()
        yield make
    torch.compiler.reset()
