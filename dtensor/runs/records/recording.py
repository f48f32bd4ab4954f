"""Begins to record: for a stretch of the program, for its first steps, or because the environment asks for it."""

import atexit
import os
import sys

from ...errors import ArgumentError, ArgumentTypeError
from ...program import environment
from .recorder import Recorder


def record(folder: str | os.PathLike[str], *, steps: int | None = None, values: str = "") -> Recorder:
    """Record what every operator computes, as a context; compare two records with `dtensor compare A B`.

    Every rank writes a file: for each operator of forward, backward and optimizer, eager or compiled, its place in the
    program, the global shape, dtype and placements of its results, and a fingerprint of their values that does not
    depend on how they are sharded. Nothing is communicated. Works for models without DTensors, too, and for those of
    torch.distributed.tensor. What is compiled is compiled again for the record, with operators that hand out values.

        with dtensor.record("runs/tp"):
            loss = model(batch)
            loss.backward()
            optimizer.step()

    Args:
        folder: where the files go; the same one on all ranks. An earlier record in it is not written over.
        steps: end the record after so many steps of an optimizer; None for all in the context.
        values: keep whole values, too, of the operators that match this pattern of "phase/module/operator", such as
            "forward/layers.0.*/mm".

    Returns:
        The recorder, a context. Its `step()` begins the next step where no optimizer does.

    Raises:
        TypeError: `folder` is no path, or `steps` no number.
        ValueError: `steps` is less than 1.
        RecordError: on entering the context, the folder holds a record already.
    """
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ArgumentTypeError(f"folder is the path of a folder, got {folder!r}; write dtensor.record('runs/tp')")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise ArgumentTypeError(f"steps is a number of optimizer steps or None, got {steps!r}")
    if steps is not None and steps < 1:
        raise ArgumentError(f"steps is {steps}; write 1 or more, or None for all steps in the context")
    return Recorder(folder, steps=steps, values=values)


def record_from_now_on(folder: str | os.PathLike[str], *, steps: int = 1, values: str = "") -> None:
    """Record the first steps of this program, from the first call of a model on."""
    here = Recorder(folder, steps=steps, values=values, waits=True)
    here.__enter__()
    atexit.register(lambda: here.close(getattr(sys, "last_value", None)))


def record_if_asked() -> None:
    """Record this program if DTENSOR_RECORD names a folder."""
    folder = environment.setting("DTENSOR_RECORD")
    if folder:
        steps = environment.setting("DTENSOR_RECORD_STEPS") or "1"
        if not steps.isdecimal() or not int(steps):
            raise ArgumentError(f"the environment variable DTENSOR_RECORD_STEPS is {steps!r}; write a number of steps")
        record_from_now_on(folder, steps=int(steps), values=environment.setting("DTENSOR_RECORD_VALUES"))


__all__ = ["record", "record_from_now_on", "record_if_asked"]
