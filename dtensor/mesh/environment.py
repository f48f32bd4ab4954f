"""The environment variables that say for plain `torch.compile` what `backend="dtensor"` is told by its options.

Read when something is compiled (DTENSOR_AGREEMENT also when a compiled graph first runs). One that is
unset, or empty, says nothing. Switches are 0 or 1, lists are separated by commas.

    DTENSOR_PASSES=0                 no passes at all; or the names of those to run
    DTENSOR_DISABLE=bucket,schedule  leave these passes out
    DTENSOR_STRICT=1                 whatever is compiled, by any backend, is traced as under `dtensor.strict()`
    DTENSOR_DUMP=folder              write there all that is made of a program (read at import, too)
    DTENSOR_VERIFY=1                 replay each graph on simulated ranks before and after every pass
    DTENSOR_MEMORY_BUDGET=1000000    bytes of gathered tensors that may be saved for the backward
    DTENSOR_SPLIT_BATCH=2            compute on so many parts of a batch, one while another travels
    DTENSOR_AGREEMENT=0              graphs run without comparing with the other ranks what they communicate
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLES = {
    "passes": "DTENSOR_PASSES",
    "disable": "DTENSOR_DISABLE",
    "strict": "DTENSOR_STRICT",
    "dump": "DTENSOR_DUMP",
    "verify": "DTENSOR_VERIFY",
    "memory_budget": "DTENSOR_MEMORY_BUDGET",
    "split_batch": "DTENSOR_SPLIT_BATCH",
    "agreement": "DTENSOR_AGREEMENT",
}
"""Option of `dtensor.compile.Options` -> the variable that stands for it. (`inner` has none: who runs is given.)"""

OFF = "0"
SWITCH = {"0": False, "1": True}


def options() -> dict[str, Any]:
    """The options that the environment gives, by name; `passes` is not among them where they are all on or off.

    Raises:
        ValueError: a switch that is neither 0 nor 1, or a number that is none.
    """
    return {name: KINDS[name](name) for name in VARIABLES if _is_given(name)}


def passes_are_off() -> bool:
    """Whether plain `torch.compile` is to be left alone."""
    return text("passes") == OFF


def switched(option: str, default: bool) -> bool:
    """The switch of `option`, or `default` if the environment does not say.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    given = text(option)
    if not given:
        return default
    if given not in SWITCH:
        raise ValueError(f"the environment variable {VARIABLES[option]} is {given!r}; write 0 or 1, or leave it unset")
    return SWITCH[given]


def text(option: str) -> str:
    """What the variable of `option` holds, as it stands."""
    return os.environ.get(VARIABLES[option], "").strip()


def fingerprint() -> tuple[str, ...]:
    """All the variables as they stand, for keys of compiled code; checks nothing."""
    return tuple([text(option) for option in VARIABLES])


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
        raise ValueError(f"the environment variable {VARIABLES[option]} is {given!r}; write a number of {unit}")
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
}
"""Option -> what reads its variable."""

__all__ = ["VARIABLES", "fingerprint", "options", "passes_are_off", "switched", "text"]
