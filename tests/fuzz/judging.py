"""Whether a program is right on ranks: as threads where it is eager, by a crew where it is compiled.

A program that one device refuses is not judged; nor is a compiled one that torch does not compile for one device.
"""

import re
import warnings

import torch

from dtensor.compile.backends.compare_ranks import disagreement
from dtensor.testing import RankError, run_threads

from .building import Recipe, build
from .crew import Crew, Outcome
from .operators import BUILDERS
from .program import Program, reference
from .running import Setting, check, communicated
from .script import script

THREADS_PATIENCE = 30.0


class Failure(AssertionError):
    """A program that is not right; the message holds it as a script.

    Attributes:
        signature: what is alike in failures of one cause.
        script: a program that fails so.
    """

    signature = ""
    script = ""


_kinds: dict[str, type[Failure]] = {}


def failure(program: Program, setting: Setting, outcome: Outcome) -> Failure:
    """The failure, of a class of its own for each signature: hypothesis takes those for different bugs."""
    name = signature(outcome)
    if name not in _kinds:
        _kinds[name] = type("Failure", (Failure,), {"signature": name})
    why = f"{outcome.kind}: {outcome.line}".replace('"""', "'''").replace("\\", "/")
    text = "\n".join(outcome.text.splitlines()[-60:])
    written = script(program, setting, why)
    error = _kinds[name](f"{why}\n\n{written}\n\n{text}")
    error.script = written
    return error


def signature(outcome: Outcome) -> str:
    """The kind and the error without its numbers and names."""
    line = re.sub(r"\[[^\]]*\]|\d+(\.\d+)?(e[+-]?\d+)?|v_\S*|\bx\b|\bv\b", "_", outcome.line)
    return f"{outcome.kind}: {line[:90]}"


def accepted(program: Program, twice: bool) -> bool:
    """Whether one device takes the program, with its gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference(program, twice=twice)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return False
    return True


def compiles(program: Program, setting: Setting) -> bool:
    """Whether torch compiles it for one device, and that gives the same tensors."""

    def wrap(f):
        torch.compiler.reset()
        return torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=setting.dynamic)

    try:
        for batch in (None, *setting.batches):
            reference(program, twice=setting.twice, batch=batch, wrap=wrap)
    except Exception:  # whatever torch says
        return False
    finally:
        torch.compiler.reset()
    return True


def judge_eager(recipe: Recipe) -> bool:
    """Run the recipe's program on threads; False if one device refuses it.

    Raises:
        Failure: it is not right.
    """
    program = build(recipe, BUILDERS)
    if not program.lines or not accepted(program, recipe.twice):
        return False
    setting = Setting(recipe.mesh, twice=recipe.twice)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_threads(check, setting.ranks, program, setting, timeout=THREADS_PATIENCE)
    except (RankError, TimeoutError) as error:
        raise failure(program, setting, _of_threads(error)) from None
    return True


def _of_threads(error: Exception) -> Outcome:
    if isinstance(error, TimeoutError):
        return Outcome("hung", str(error).splitlines()[0], str(error))
    lines = [x for x in str(error).splitlines() if x and not x.startswith(" ")]
    line = next((x for x in reversed(lines) if re.match(r"[\w.]+(Error|Wrong)\b", x)), lines[-1])
    return Outcome("wrong" if "Wrong" in line else "raised", line, str(error))


def judge_compiled(recipe: Recipe, setting: Setting, crew: Crew) -> bool:
    """Run the recipe's program compiled, on a crew; False if one device refuses it, eager or compiled.

    Raises:
        Failure: it is not right.
    """
    program = build(recipe, BUILDERS)
    if not program.lines or not accepted(program, False):
        return False
    outcome = crew.run(program, setting)
    if outcome.kind != "ok" and (outcome.kind == "wrong" or compiles(program, setting)):
        raise failure(program, setting, outcome)
    return outcome.kind == "ok"


def judge_ranks(recipe: Recipe, setting: Setting) -> bool:
    """Compile the recipe's program for each rank in turn; False if one device refuses it, eager or compiled.

    Nothing runs on real ranks, so a program takes no longer than its compilations, and a difference is found whether or
    not the ranks would meet it.

    Raises:
        Failure: ranks would communicate differently, or only some can compile it.
    """
    program = build(recipe, BUILDERS)
    if not program.lines or not accepted(program, False):
        return False
    told, failed = {}, {}
    for rank in range(setting.ranks):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told[rank] = communicated(program, setting, rank)
        except Exception as error:
            failed[rank] = f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]
    if failed and not compiles(program, setting):
        return False
    if failed:
        kind = "raised" if len(failed) == setting.ranks else "apart"
        raise failure(program, setting, Outcome(kind, next(iter(failed.values()))))
    if found := disagreement(told):
        raise failure(program, setting, Outcome("apart", found.splitlines()[0], found))
    return True


__all__ = ["Failure", "judge_compiled", "judge_eager", "judge_ranks"]
