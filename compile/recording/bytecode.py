"""The Python that Dynamo made of a function, to read: decompiled, or disassembled where that does not work."""

import dis
import importlib
import io
import warnings
from collections.abc import Callable
from functools import cache
from types import CodeType


def decompiled(before: CodeType, after: CodeType) -> tuple[str, str]:
    """Name of a file, and its content: the code of a function after Dynamo, with that before it where it is found.

    depyf reads most bytecode, and not all: that of frames with graph breaks under Python 3.11, for one.
    """
    head = f"# {before.co_name} of {before.co_filename}:{before.co_firstlineno}, as Dynamo runs it\n"
    try:
        return "bytecode.py", f"{head}\n{_decompiler()(after)}"
    except Exception as error:  # whatever a decompiler trips over
        reason = f"# depyf cannot read it: {type(error).__name__}: {error}"
        return "bytecode.txt", f"{head}{reason}\n\n{_disassembled(after)}"


@cache
def _decompiler() -> Callable[[CodeType], str]:
    """That of depyf, which is slow to import, and leaves a file open as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return importlib.import_module("depyf").decompile


def _disassembled(code: CodeType) -> str:
    out = io.StringIO()
    dis.dis(code, file=out)
    return out.getvalue()


__all__ = ["decompiled"]
