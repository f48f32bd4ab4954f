"""Random functions that take views of views and write to them, as lines of Python, and what becomes of each."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dtensor import DTensor, Replicate, Shard, distribute_tensor

VIEWS: tuple[Callable[[random.Random, torch.Tensor], str], ...] = (
    lambda r, x: f".chunk({r.choice((2, 3))}, {_dim(r, x)})[{r.choice((0, -1))}]",
    lambda r, x: f".split({r.choice((1, 2, 3))}, {_dim(r, x)})[{r.choice((0, -1))}]",
    lambda r, x: f".unbind({_dim(r, x)})[{r.choice((0, -1))}]",
    lambda r, x: f".select({_dim(r, x)}, {r.choice((0, -1))})",
    lambda r, x: f".narrow({(d := _dim(r, x))}, {(k := r.randrange(x.shape[d]))}, {r.randint(1, x.shape[d] - k)})",
    lambda r, x: f"[{r.choice((1, -2))}:]",
    lambda r, x: f"[..., ::{r.choice((2, 3))}]",
    lambda r, x: f".transpose({_dim(r, x)}, {_dim(r, x)})",
    lambda r, x: ".view(-1)",
    lambda r, x: f".unflatten({(d := _dim(r, x))}, (2, {x.shape[d] // 2}))",
    lambda r, x: f".flatten({r.choice((0, 1))})",
    lambda r, x: f".unsqueeze({_dim(r, x)})",
    lambda r, x: f".diagonal(0, {_dim(r, x)}, {_dim(r, x)})",
    lambda r, x: ".detach()",
)
"""Text of a view of a tensor, which one device may refuse."""

WRITES: tuple[Callable[[random.Random, str, list[str]], str], ...] = (
    lambda r, name, others: f"{name}.add_({r.randint(1, 3)})",
    lambda r, name, others: f"{name}.mul_(2)",
    lambda r, name, others: f"{name}.copy_({r.choice(others)} * 3)",
    lambda r, name, others: f"{name}.add_({r.choice(others)} * 1)",
    lambda r, name, others: f"{name}[0] = {r.randint(1, 9)}",
    lambda r, name, others: f"{name}[..., -1:] = {r.choice(others)}[..., :1] * 1",
    lambda r, name, others: f"{name}.fill_({r.randint(1, 9)})",
)
"""Text of a write to a tensor; what is read for it never shares its memory, as one device then promises no order."""


def _dim(r: random.Random, x: torch.Tensor) -> int:
    return r.randrange(max(x.dim(), 1))


def function(seed: int, length: int = 9) -> str:
    """The text of a function `f(x)` that one device accepts: it returns all of its tensors, times 1."""
    r = random.Random(seed)
    first = r.choice(("t = x * 1", "t = x", "t = x.t() * 2"))
    lines, names = [first], ["t"]
    while len(lines) < length:
        of = r.choice(names)
        if r.random() < 0.5:
            x = _run(lines, "x")[of]
            name = f"v{len(names)}"
            try:
                line = f"{name} = {of}{r.choice(VIEWS)(r, x)}"
            except (ValueError, IndexError):
                continue
        else:
            name, line = "", r.choice(WRITES)(r, of, names)
        try:
            _run([*lines, line], "x")
        except (RuntimeError, IndexError, ValueError):
            continue
        lines.append(line)
        names += [name] * bool(name)
    body = "\n    ".join([*lines, "return " + ", ".join([f"{n} * 1" for n in names])])
    return f"def f(x):\n    {body}\n"


def _run(lines: list[str], argument: str) -> dict[str, Any]:
    space: dict[str, Any] = {argument: given()}
    exec("\n".join(lines), space)
    return space


def given() -> torch.Tensor:
    """The argument of each function."""
    return torch.arange(48.0).view(6, 8)


def outcome(seed: int, mesh: Any, compiled: bool) -> str:
    """ "right", "wrong", or the first words of an error, for the function of a seed, with the argument in a layout."""
    torch._dynamo.reset()
    text, space = function(seed), {"torch": torch}
    exec(text, space)
    f, x = space["f"], given()
    placement = (Shard(0), Shard(1), Shard(1), Replicate())[seed % 4]
    y = distribute_tensor(x, mesh, [placement])
    want = [*f(x), x]
    try:
        got = [*(torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f)(y), y]
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    same = all(isinstance(a, DTensor) and torch.equal(a.full_tensor(), b) for a, b in zip(got, want, strict=True))
    return "right" if same else f"wrong: {placement} {text}"


def outcomes(seeds: range, mesh: Any, compiled: bool) -> Counter[str]:
    """How often each outcome is."""
    return Counter([outcome(seed, mesh, compiled) for seed in seeds])
