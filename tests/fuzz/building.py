"""From numbers to a program: each step names a builder of `operators`, whose choices are numbers too.

The program is run on one device while it is built, line by line, so that the next step knows shapes and values. A
step that does not fit, or that one device refuses, is left out; what hypothesis makes smaller is a program again.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .program import NAMES, Input, Module, Program, plain_modules, values_of

LONGEST = 4096
"""Elements of a value at most."""
LARGEST = 1e3
"""Its absolute value at most: what is larger amplifies rounding."""
APART = 1e-6
"""How far values are apart that an operator orders."""

PLACEMENTS_OF_DIM = 5
"""Of so many numbers one replicates and one makes a sum; the others shard."""


FEATURES = {
    "writes to what views share": "",
    "second derivatives through borders": "",
    "second derivatives of losses": "",
    "second derivatives of embeddings": "",
    "second derivatives of topk": "",
    "attention over empty dimensions": "",
    "one-hot": "",
}
"""What programs may do -> what is wrong with it (issue 23)."""
ON: frozenset[str] = frozenset(name for name, wrong in FEATURES.items() if not wrong)
"""Those features that are on."""


class Skip(Exception):
    """The step does not fit."""


@dataclass(frozen=True)
class Recipe:
    """What hypothesis draws.

    Attributes:
        mesh: shape of the mesh.
        sizes: lengths that dimensions of inputs have.
        steps: (builder, numbers) each.
        dtype: of float inputs.
        checkpointed: (start, length) of the lines in a checkpointed function, where that may be.
        twice: whether the program is differentiated twice.
    """

    mesh: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str = "float64"
    checkpointed: tuple[int, int] | None = None
    twice: bool = False


class Choices:
    """A step's numbers, used one after the other; 0 when they are used up."""

    def __init__(self, building: "Building", numbers: tuple[int, ...]):
        self.building, self.numbers, self.index = building, numbers, 0
        self.new: list[Input] = []
        self.modules: list[Module] = []

    # Numbers and names.

    def number(self, n: int) -> int:
        """A number below `n`."""
        if n < 1:
            raise Skip
        self.index += 1
        return (self.numbers[self.index - 1] if self.index <= len(self.numbers) else 0) % n

    def one_of(self, *options):
        """One of `options`."""
        return options[self.number(len(options))]

    def switch(self) -> bool:
        """False first."""
        return bool(self.number(2))

    def value(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """The name of a value that fits; the newest first."""
        return self.one_of(*[name for name, x in reversed(self.building.values.items()) if fits(x)])

    def float(self, low: int = 0, high: int = 4, filled: bool = False) -> str:
        """A value with a number of dimensions between `low` and `high`; with `filled`, one that has elements."""
        return self.value(lambda x: x.is_floating_point() and low <= x.dim() <= high and (x.numel() or not filled))

    def of_shape(self, shape, dtype: torch.dtype | None = None) -> str:
        """A value of `shape`, or a new input."""
        dtype = dtype or self.building.dtype
        found = [k for k, x in self.building.values.items() if tuple(x.shape) == tuple(shape) and x.dtype == dtype]
        which = self.number(len(found) + 1)
        return found[which] if which < len(found) else self.input(shape)

    def input(self, shape, high: int | None = None) -> str:
        """A new input; integers below `high` if that is given."""
        shape = tuple(shape)
        if any(n < 0 for n in shape) or (high is not None and high < 1):
            raise Skip
        name = f"{'x' if high is None else 'i'}{len(self.building.inputs) + len(self.new)}"
        like = next((x for x in self.building.inputs if x.shape[:1] == shape[:1] and x.batch == 0), None)
        batch = 0 if like is not None or not self.building.inputs else None
        dtype = "int64" if high is not None else self.building.dtype_name
        placements = self.placements(shape, partial=high is None)
        grad = high is None and self.number(6) != 5
        self.new.append(Input(name, shape, dtype, placements, high or 0, grad, batch))
        return name

    def placements(self, shape, partial: bool) -> tuple[str, ...]:
        """One for each axis of the mesh: mostly shards."""
        made = []
        for _ in self.building.recipe.mesh:
            k = self.number(PLACEMENTS_OF_DIM)
            if k == 0 or not shape:
                made.append("P" if k == 1 and partial else "R")
            else:
                made.append("P" if k == 4 and partial else f"S{self.number(len(shape))}")
        return tuple(made)

    def where(self, name: str) -> str:
        """Placements for `move`, as text."""
        given = self.placements(self.shape(name), partial=False)
        return ", ".join("Replicate()" if p == "R" else f"Shard({p[1:]})" for p in given)

    def module(self, text: str) -> str:
        """A new module, parallelized somehow."""
        name = f"m{len(self.building.modules) + len(self.modules)}"
        plans = (
            ("replicate", "shard", "fsdp", "tp")
            if len(self.building.recipe.mesh) == 1
            else (
                "replicate",
                "shard",
                "fsdp",
            )
        )
        self.modules.append(Module(name, text, self.one_of(*plans)))
        return name

    # What is known of a name.

    def tensor(self, name: str) -> torch.Tensor:
        """The value on one device; inputs of this step included."""
        for x in self.new:
            if x.name == name:
                return self.building.made(x)
        return self.building.values[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor(name).shape)

    def dim(self, name: str) -> int:
        """One of its dimensions."""
        return self.number(self.tensor(name).dim())

    def size(self) -> int:
        """One of the lengths that inputs have."""
        return self.one_of(*self.building.recipe.sizes)

    def distinct(self, name: str) -> str:
        """`name`, if all its elements are well apart: otherwise rounding decides which comes first."""
        x = self.tensor(name).detach().flatten().double().sort().values
        if x.numel() > 1 and (x.diff() < APART).any():
            raise Skip
        return name

    def feature(self, name: str) -> None:
        """Leave the step out unless this feature is on."""
        assert name in FEATURES, f"{name} is not in FEATURES"
        if name not in self.building.features:
            raise Skip

    def feature_of_twice(self, name: str) -> None:
        """Leave the step out of what is differentiated twice unless this feature is on."""
        if self.building.recipe.twice:
            self.feature(name)

    def need(self, condition) -> None:
        """Leave the step out unless `condition`."""
        if not condition:
            raise Skip


class Building:
    """A program as far as it is built, and its values on one device."""

    def __init__(self, recipe: Recipe, builders: dict[str, Callable[[Choices], str]], features=ON):
        self.features = features
        self.recipe, self.builders = recipe, builders
        self.dtype_name, self.dtype = recipe.dtype, getattr(torch, recipe.dtype)
        self.inputs: list[Input] = []
        self.modules: list[Module] = []
        self.lines: list[str] = []
        self.values: dict[str, torch.Tensor] = {}
        self.space = dict(NAMES)
        self.used: set[str] = set()
        self.written: set[int] = set()  # lines that write to what was there before
        self.kept: set[str] = set()  # what was written to, and what shares its memory
        self.moved: set[str] = set()
        self.unsure: set[int] = set()  # memory that a redistribution shares, or does not, as it likes

    def made(self, given: Input) -> torch.Tensor:
        """The input as it will be."""
        index = next((k for k, x in enumerate(self.inputs) if x.name == given.name), len(self.inputs))
        return values_of(given.shape, given.dtype, given.high, index).requires_grad_(given.grad)

    def add(self, builder: str, numbers: tuple[int, ...]) -> None:
        """One step, if it fits."""
        choices = Choices(self, numbers)
        try:
            text = self.builders[builder](choices)
            self._run(text, choices)
        except Skip:
            return

    def _run(self, text: str, choices: Choices) -> None:
        """Run the step on one device, and keep it if that goes well. A text without `=` makes a new value."""
        if not text:  # no more than a new input
            self._accept(choices)
            return
        names, _, call = text.rpartition(" = ") if " = " in text and not text.startswith("!") else ("", "", text)
        writes = text.startswith("!")
        line = text.removeprefix("!") if writes else ""
        if not writes:
            names = names or f"v{len(self.values)}"
            line = f"{names} = {call}"
        space = dict(self.space)
        for k, x in enumerate(choices.new):
            space[x.name] = values_of(x.shape, x.dtype, x.high, len(self.inputs) + k).requires_grad_(x.grad)
        space.update(self._modules(choices))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, space)
            made = {n.strip(): space[n.strip()] for n in names.split(",") if n.strip()}
            self._check(made, [v for k, v in space.items() if k in self.values] if writes else [])
        except (Skip, RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            if writes:
                self._replay()
            raise Skip from error
        self._accept(choices)
        self.space = space
        words = {*_names(line)}
        if writes:
            self.written.add(len(self.lines))
            self.kept |= self._sharing(line)
        self.used |= (words & self.values.keys()) - made.keys()
        self.lines.append(line)
        self.values.update(made)
        if call.startswith(("move(", "through_")):
            self.moved |= made.keys()
            self.unsure |= {x.untyped_storage().data_ptr() for x in made.values()}

    def _replay(self) -> None:
        """Make all values anew: the line that was left out may have written."""
        space = dict(NAMES)
        space.update({x.name: self.made(x) for x in self.inputs})
        space.update({m.name: self.space[m.name] for m in self.modules})
        for line in self.lines:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, space)
        self.space = space
        self.values = {k: space[k] for k in self.values}
        self.unsure = {x.untyped_storage().data_ptr() for k, x in self.values.items() if k in self.moved}

    def _accept(self, choices: Choices) -> None:
        for x in choices.new:
            self.values[x.name] = self.space[x.name] = self.made(x)
            self.inputs.append(x)
        self.modules += choices.modules

    def _modules(self, choices: Choices) -> dict:
        if not choices.modules:
            return {}
        have = Program((), (*self.modules, *choices.modules), (), ())
        return dict(zip([m.name for m in have.modules], plain_modules(have)))

    def _check(self, made: dict[str, torch.Tensor], written: list[torch.Tensor]) -> None:
        for x in (*made.values(), *written):
            if not isinstance(x, torch.Tensor) or x.numel() > LONGEST or x.is_complex():
                raise Skip
            if x.is_floating_point() and x.numel() and not x.detach().abs().max() < LARGEST:
                raise Skip

    def aliases(self, name: str) -> list[str]:
        """Other names that share memory with `name`."""
        mine = self.values[name].untyped_storage().data_ptr()
        return [k for k, x in self.values.items() if k != name and x.numel() and x.untyped_storage().data_ptr() == mine]

    def may_write(self, name: str) -> bool:
        """Whether a step may write to `name`."""
        if self.values[name].untyped_storage().data_ptr() in self.unsure:
            return False
        return "writes to what views share" in self.features or not self.aliases(name)

    def _sharing(self, line: str) -> set[str]:
        written = _names(line)[:1]
        return {*written, *(k for name in written if name in self.values for k in self.aliases(name))}

    def program(self) -> Program:
        """All steps; what nothing used is returned, and what was written to."""
        names = [k for k in self.values if k not in self.used or k in self.kept]
        given = {x.name for x in self.inputs}
        outputs = [k for k in names if k not in given]
        outputs.sort(key=lambda k: not self.values[k].requires_grad)
        inputs = tuple(self.inputs)
        return Program(inputs, tuple(self.modules), tuple(self.lines), tuple(outputs), self._checkpointed(outputs))

    def _checkpointed(self, outputs: list[str]):
        if self.recipe.checkpointed is None or not self.lines:
            return None
        start = self.recipe.checkpointed[0] % len(self.lines)
        stop = min(start + 1 + self.recipe.checkpointed[1], len(self.lines))
        if any(start <= k for k in self.written):
            return None  # what is computed again would read what was written since
        inside = [_names(x) for x in self.lines[start:stop]]
        defined = [n for line in self.lines[start:stop] for n in _names(line.partition(" = ")[0])]
        read = [n for words in inside for n in words]
        known = {*self.values, *(m.name for m in self.modules)}
        takes = tuple(dict.fromkeys(n for n in read if n not in defined and n in known))
        after = {n for line in self.lines[stop:] for n in _names(line)} | set(outputs)
        gives = tuple(n for n in dict.fromkeys(defined) if n in after)
        return (start, stop, takes, gives) if gives else None


def _names(line: str) -> list[str]:
    """The words of a line that may be names of values, in order."""
    found, word = [], ""
    for c in line + " ":
        if c.isalnum() or c in "_.":
            word += c
        else:
            found.append(word.partition(".")[0])
            word = ""
    return [w for w in found if w and not w[0].isdigit()]


def build(recipe: Recipe, builders: dict[str, Callable[[Choices], str]], features=ON) -> Program:
    """The program of a recipe; `features` are names of `FEATURES` that are on."""
    building = Building(recipe, builders, features)
    for name, numbers in recipe.steps:
        if not building.values and name != "input":
            building.add("input", numbers)
        building.add(name, numbers)
    return building.program()
