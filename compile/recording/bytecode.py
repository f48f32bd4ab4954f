"""The bytecode that Dynamo made of a function, in readable form: decompiled, or disassembled where that fails."""

import dis
import importlib
import io
import warnings
from collections.abc import Callable
from functools import cache
from types import CodeType


def decompiled(before: CodeType, after: CodeType) -> tuple[str, str]:
    """Return a file name and its content: the code that Dynamo made of a function, headed by where the original is.

    depyf reads most bytecode but not all: frames with graph breaks under Python 3.11, for example, are disassembled.
    """
    head = f"# {before.co_name} of {before.co_filename}:{before.co_firstlineno}, as Dynamo runs it\n"
    try:
        return "bytecode.py", f"{head}\n{_decompiler()(after)}"
    except Exception as error:  # a decompiler may fail in any way
        reason = f"# depyf cannot read it: {type(error).__name__}: {error}"
        return "bytecode.txt", f"{head}{reason}\n\n{_disassembled(after)}"


@cache
def _decompiler() -> Callable[[CodeType], str]:
    """depyf's decompiler. It is imported on first use because depyf is slow to import, and leaves a file open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        return importlib.import_module("depyf").decompile


def _disassembled(code: CodeType) -> str:
    out = io.StringIO()
    dis.dis(code, file=out)
    return out.getvalue()


__all__ = ["decompiled"]
