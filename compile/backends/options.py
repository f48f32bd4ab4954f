"""Options of `torch.compile(model, backend="dtensor", options={...})`: validated, frozen, and part of the cache key.

Plain `torch.compile` reads them from environment variables, one for each option (`dtensor.program.environment`).
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dtensor.errors import ArgumentError, ArgumentTypeError
from dtensor.parallel.decisions.files import NAME, digest
from dtensor.passes import PIPELINE, REGISTERED, Pass, Raise, select
from dtensor.passes.runner import check_pass
from dtensor.program import environment

INNER = ("inductor", "aot_eager", "eager")
INNER_AT = {"inductor": "inductor", "aot_eager": "aot_eager", "dynamo": "eager", "eager": "eager"}
"""How far to compile -> the inner compiler that goes as far."""


@dataclass(frozen=True)
class Options:
    """What the backend does. The verifier of graphs runs after every pass that changed one, whatever the options are.

    Attributes:
        inner: what runs the graph: "inductor" generates code, "aot_eager" runs the graph that the passes produced
            operator by operator, "eager" runs Dynamo's graph as it is, without AOTAutograd and passes.
        passes: the passes to run, in the order in which they run within their stages: names, instances of
            `dtensor.passes.Pass` of your own, and `...` for all of `dtensor.passes.PIPELINE` that are not named; None
            for all of these. What is compiled with a pass that has no `fingerprint` is not taken from a cache.
        disable: names of passes to leave out.
        strict: compile as under `dtensor.strict()`: an implicit redistribution that communicates, in forward or
            backward, fails the compilation. With inner="eager" the graph runs under it.
        dump: the folder to which graphs as text, guards and the manifest are written
            (`dtensor.compile.recording.folder`); None for none. The program is then compiled anew, not taken from a
            cache.
        verify: run each graph before and after every pass on simulated ranks, with random inputs
            (`dtensor.compile.backends.replay`), and raise if a pass changed what it computes. Slow, and nothing is
            taken from a cache.
        memory_budget: bytes of gathered tensors that may be saved for the backward; tensors beyond it are gathered
            again. None gathers parameters again and saves the others (`dtensor.passes.Regather`).
        memory: bytes that a rank may hold at once in a whole step (`dtensor.compile.step`), from parameters to
            gradients; what the backward needs of the forward is then held, gathered or computed again, or put on the
            host, whatever costs least. None computes again as torch's partitioner does, whatever that takes.
        split_batch: the number of microbatches into which a batch is split, so that one computes while another
            communicates (`dtensor.passes.SplitBatch`); 1 leaves it unsplit.
        agreement: whether the ranks compare what a graph communicates before it first runs (`dtensor.comm.agreement`).
        decide: whether the layouts of a model that `distribute_model` sharded are decided for the whole graph at once
            (`dtensor.parallel.decisions`); otherwise each operator takes what is cheapest for its own operands. The
            path of a folder takes the decisions that a dump wrote there, as decisions.json, for the same programs.
    """

    inner: str = "inductor"
    passes: tuple[str | Pass, ...] | None = None
    disable: tuple[str, ...] = ()
    strict: bool = False
    dump: str | None = None
    verify: bool = False
    memory_budget: int | None = None
    memory: int | None = None
    split_batch: int = 1
    agreement: bool = True
    decide: bool | str = True

    @property
    def cacheable(self) -> bool:
        """Whether compiled code may come from a cache: to be verified, examined or dumped, a graph must be compiled
        anew."""
        known = all(p.fingerprint is not None for p in self.own_passes())
        return known and self.dump is None and not self.verify and not environment.findings()

    def chosen(self) -> tuple[Pass, ...]:
        """Return the passes that are to run, in order."""
        return select(self.passes, self.disable)

    def own_passes(self) -> tuple[Pass, ...]:
        """Return the passes of the program among them."""
        return tuple([p for p in self.passes or () if isinstance(p, Pass)])

    def fingerprint(self) -> str:
        """Return what the options are, as part of a cache key."""
        said = [(p.name, p.stage, p.exactness, p.fingerprint) if isinstance(p, Pass) else p for p in self.passes or ()]
        decided = digest(self.decide) if isinstance(self.decide, str) else ""
        return repr((replace(self, passes=None), self.passes is None, said, decided))

    def at_level(self) -> "Options":
        """Return these options with what the environment says instead, if it says how far to compile: `inner` goes no
        further, the passes are those that it names, and those that it leaves out are left out, too.

        Raises:
            ValueError: a variable holds an invalid value.
        """
        level = environment.level()
        if level is None:
            return self
        given = environment.options()
        passes = () if environment.passes_are_off() else given.get("passes", self.passes)
        changed = {"passes": passes, "disable": (*self.disable, *given.get("disable", ()))}
        for name in changed:
            changed[name] = CHECKS[name](f"the environment variable {environment.VARIABLES[name]}", changed[name])
        inner = INNER_AT.get(level, self.inner)
        further = INNER.index(self.inner) < INNER.index(inner)
        return replace(self, inner=inner if further else self.inner, **changed)

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> "Options":
        """Validate the options of a `torch.compile` call.

        Raises:
            ValueError: an unknown option, pass or inner compiler; the message names the nearest known one.
            TypeError: a value of the wrong type.
        """
        known = [f.name for f in fields(Options)]
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentTypeError(f"options of backend 'dtensor' are a dict; got {given!r}")
        for name in given or {}:
            if name not in known:
                raise ArgumentError(f"unknown option {name!r} of backend 'dtensor'{_nearest(name, known)}")
        return _checked(dict(given or {}), lambda name: f"option {name!r}")

    @staticmethod
    def of_environment() -> "Options":
        """Return the options of plain `torch.compile`. Functional collectives from outside this library are left alone
        unless "raise" is among the requested passes.

        Raises:
            ValueError: a variable holds an invalid value for its option.
        """
        given = environment.options()
        if "passes" not in given:
            given["disable"] = (Raise.name, *given.get("disable", ()))
        return _checked(given, lambda name: f"the environment variable {environment.VARIABLES[name]}")


def _checked(given: dict[str, Any], called: Callable[[str], str]) -> Options:
    """Validate `given` and make options of it; errors refer to an option by the name that `called` returns."""
    for name, check in CHECKS.items():
        if name in given:
            given[name] = check(called(name), given[name])
    return Options(**given)


def _inner(option: str, given: Any) -> str:
    if given not in INNER:
        raise ArgumentError(f"unknown inner compiler {given!r}{_nearest(str(given), INNER)}")
    return given


def _names(option: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable) or not all(isinstance(n, str) for n in given):
        raise ArgumentTypeError(f"{option} is a list of pass names, got {given!r}")
    for name in given:
        _known(option, name)
        required = REQUIRED.get(name)
        if required:
            raise ArgumentError(f"the pass {name!r} in {option} cannot be left out: without it {required}")
    return tuple(given)


REQUIRED = {p.name: p.required for p in REGISTERED if p.required}
"""Pass that cannot be left out -> why."""


def _known(option: str, name: str) -> None:
    known = [p.name for p in REGISTERED]
    if name not in known:
        raise ArgumentError(f"unknown pass {name!r} in {option}{_nearest(name, known)}")


def _passes(option: str, given: Any) -> tuple[str | Pass, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, Pass)) or not isinstance(given, Iterable):
        raise ArgumentTypeError(f"{option} is a list of passes and names of passes, got {given!r}")
    listed = list(given)
    if listed.count(...) > 1:
        raise ArgumentError(f"{option} says ... more than once; it stands for all passes that are not named")
    taken = {p.name for p in REGISTERED}
    for p in listed:
        if isinstance(p, str):
            _known(option, p)
        elif p is not ...:
            check_pass(p)
            if p.name in taken:
                raise ArgumentError(f"there are two passes {p.name!r} in {option}; give yours another name")
            taken.add(p.name)
    named = [p for p in listed if isinstance(p, str)]
    rest = [p.name for p in PIPELINE if p.name not in named]
    return tuple([q for p in listed for q in (rest if p is ... else [p])])


def _switch(option: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ArgumentTypeError(f"{option} is True or False, got {given!r}")
    return given


def _switch_or_folder(option: str, given: Any) -> bool | str:
    if isinstance(given, bool):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentTypeError(f"{option} is True, False or the path of a folder with decisions.json, got {given!r}")
    path = os.path.abspath(os.fspath(given))
    if not any(Path(path).rglob(NAME)):
        raise ArgumentError(f"there is no {NAME} in {path}; write the path of a dump, options={{'dump': …}}, or True")
    return path


def _folder(option: str, given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise ArgumentTypeError(f"{option} is the path of a folder or None, got {given!r}")
    path = os.path.abspath(os.fspath(given))
    if os.path.exists(path) and not os.path.isdir(path):
        raise ArgumentError(f"{option} is the path of a folder, but {path} is a file; write another path")
    return path


def _bytes_or_none(option: str, given: Any) -> int | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise ArgumentTypeError(f"{option} is a number of bytes or None, got {given!r}")
    return given


def _positive_bytes(option: str, given: Any) -> int | None:
    found = _bytes_or_none(option, given)
    if found == 0:
        raise ArgumentError(f"{option} is the number of bytes that a step may take, got 0; write None for no bound")
    return found


def _parts(option: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise ArgumentTypeError(f"{option} is a number of microbatches, got {given!r}")
    if given < 1:
        raise ArgumentError(f"{option} is a number of microbatches, got {given}; write 1 to leave it unsplit, or more")
    return given


def _nearest(name: str, known: Any) -> str:
    found = get_close_matches(name, list(known), n=1)
    listed = ", ".join(known)
    return f"; did you mean {found[0]!r}? Known: {listed}" if found else f"; known: {listed}"


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "inner": _inner,
    "passes": _passes,
    "disable": _names,
    "strict": _switch,
    "dump": _folder,
    "verify": _switch,
    "memory_budget": _bytes_or_none,
    "memory": _positive_bytes,
    "split_batch": _parts,
    "agreement": _switch,
    "decide": _switch_or_folder,
}
"""Option -> the function that validates its value and returns it in its final form."""

__all__ = ["INNER", "Options"]
