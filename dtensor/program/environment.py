"""The environment variables that give plain `torch.compile` the options of `backend="dtensor"`.

They are read when something is compiled (DTENSOR_AGREEMENT also when a compiled graph first runs). A variable that is
unset or empty has no effect. Switches are 0 or 1; lists are separated by commas.

    DTENSOR_PASSES=0                 run no passes at all; or the names of those to run
    DTENSOR_DISABLE=bucket,schedule  skip these passes
    DTENSOR_STRICT=1                 trace everything that is compiled, by any backend, as under `dtensor.strict()`
    DTENSOR_DUMP=folder              write everything that is made from a program to this folder (also read at import)
    DTENSOR_VERIFY=1                 replay each graph on simulated ranks before and after every pass
    DTENSOR_MEMORY_BUDGET=1000000    bytes of gathered tensors that may be saved for the backward
    DTENSOR_SPLIT_BATCH=2            split a batch into this many microbatches; one computes while another communicates
    DTENSOR_AGREEMENT=0              run graphs without comparing their collectives with those of the other ranks
    DTENSOR_DECIDE=0                 let each operator choose its layouts, rather than decide for the whole graph

DTENSOR_PROGRESS=0 says nothing of what takes long (`dtensor.program.stages`); 1 writes all ranks' lines on a terminal.
DTENSOR_SHARE_COMPILES=0 lets every rank of a job compile for itself, where one would compile for all with equal graphs.

Two more are for finding out who is to blame (`dtensor.compile.bisect`). They are read at import, and hold for all that
is compiled, by backend="dtensor" too:

    DTENSOR_COMPILE_LEVEL=aot_eager  compile no further than this: eager (not at all), dynamo, aot_eager or inductor;
                                     DTENSOR_PASSES and DTENSOR_DISABLE then also hold for backend="dtensor"
    DTENSOR_FINDINGS=folder          examine each graph on simulated ranks; write what passes do wrong to this folder
"""

import os
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError

VARIABLES = {
    "passes": "DTENSOR_PASSES",
    "disable": "DTENSOR_DISABLE",
    "strict": "DTENSOR_STRICT",
    "dump": "DTENSOR_DUMP",
    "verify": "DTENSOR_VERIFY",
    "memory_budget": "DTENSOR_MEMORY_BUDGET",
    "split_batch": "DTENSOR_SPLIT_BATCH",
    "agreement": "DTENSOR_AGREEMENT",
    "decide": "DTENSOR_DECIDE",
}
"""Option of `dtensor.compile.Options` -> its variable. (`inner` has none: with plain `torch.compile`, the backend is
given.)"""

LEVEL, FINDINGS = "DTENSOR_COMPILE_LEVEL", "DTENSOR_FINDINGS"
"""The variables for finding out who is to blame."""

LEVELS = ("eager", "dynamo", "aot_eager", "inductor")
"""How far a program is compiled, from not at all to the most."""

OFF = "0"
SWITCH = {"0": False, "1": True}


def options() -> dict[str, Any]:
    """The options that the environment sets, by name. `passes` is absent if it switches all passes on or off.

    Raises:
        ValueError: A switch is neither 0 nor 1, or a number is not a number.
    """
    return {name: KINDS[name](name) for name in VARIABLES if _is_given(name)}


def passes_are_off() -> bool:
    """Whether plain `torch.compile` must run without passes."""
    return text("passes") == OFF


def switched(option: str, default: bool) -> bool:
    """The switch of `option`, or `default` if the environment does not set it.

    Raises:
        ValueError: It is neither 0 nor 1.
    """
    found = is_on(VARIABLES[option])
    return default if found is None else found


def text(option: str) -> str:
    """The raw text of the variable of `option`, stripped; "" if it is unset."""
    return os.environ.get(VARIABLES[option], "").strip()


def setting(variable: str) -> str:
    """The raw text of a variable that is no option of the compiler, stripped; "" if it is unset."""
    return os.environ.get(variable, "").strip()


def is_on(variable: str) -> bool | None:
    """Whether a switch is on; None if it is unset.

    Raises:
        ValueError: It is neither 0 nor 1.
    """
    given = setting(variable)
    if given and given not in SWITCH:
        raise ArgumentError(f"the environment variable {variable} is {given!r}; write 0 or 1, or leave it unset")
    return SWITCH.get(given)


def level() -> str | None:
    """How far to compile at most, one of `LEVELS`; None if the environment does not say.

    Raises:
        ValueError: It is none of them.
    """
    given = os.environ.get(LEVEL, "").strip()
    if given and given not in LEVELS:
        raise ArgumentError(f"the environment variable {LEVEL} is {given!r}; write one of {', '.join(LEVELS)}")
    return given or None


def findings() -> str:
    """The folder to which findings are written; "" if graphs are not examined."""
    return os.environ.get(FINDINGS, "").strip()


def fingerprint() -> tuple[str, ...]:
    """The raw text of all variables, for cache keys of compiled code. Checks nothing."""
    return (*[text(option) for option in VARIABLES], os.environ.get(LEVEL, "").strip(), findings())


def _is_given(option: str) -> bool:
    return text(option) not in (("", *SWITCH) if option == "passes" else ("",))


def _switch(option: str) -> bool:
    return switched(option, False)


def _names(option: str) -> tuple[str, ...]:
    return tuple([name.strip() for name in text(option).split(",") if name.strip()])


def _number(option: str) -> int:
    given = text(option)
    if not given.isdecimal():
        unit = {"memory_budget": "bytes", "split_batch": "parts"}[option]
        raise ArgumentError(f"the environment variable {VARIABLES[option]} is {given!r}; write a number of {unit}")
    return int(given)


KINDS: dict[str, Callable[[str], Any]] = {
    "passes": _names,
    "disable": _names,
    "strict": _switch,
    "dump": text,
    "verify": _switch,
    "memory_budget": _number,
    "split_batch": _number,
    "agreement": _switch,
    "decide": _switch,
}
"""Option -> the function that reads its variable."""

__all__ = [
    "FINDINGS",
    "LEVEL",
    "LEVELS",
    "OFF",
    "VARIABLES",
    "findings",
    "fingerprint",
    "is_on",
    "level",
    "options",
    "passes_are_off",
    "setting",
    "switched",
    "text",
]
