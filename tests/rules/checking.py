"""Runs every candidate of the calls that the files of this folder list, also with other numbers than theirs."""

from collections.abc import Callable, Iterable

import torch
from torch.utils._pytree import tree_leaves

from dtensor.testing.rules.candidates import Case, as_list, is_real, mapped, tensors, wrong_candidates

WIDE = (torch.float32, torch.float64)
"""Dtypes of which others are drawn; in narrow ones a sum that is exact becomes one that is rounded."""


def signed(x):
    """Numbers of both signs, none close to zero."""
    return ((torch.rand(x.shape, dtype=torch.float64) + 0.5) * (2 * torch.randint(2, x.shape) - 1)).to(x.dtype)


def whole(x):
    """Integers of both signs, none of them zero, which many may be divided by."""
    return torch.randint(1, 4, x.shape) * (2 * torch.randint(2, x.shape) - 1)


def has_fractions(case: Case) -> bool:
    """Whether a number that is no tensor has a fraction."""
    return any(isinstance(x, float) and not x.is_integer() for x in tree_leaves((case.args, case.kwargs)))


def redrawn(case: Case, draw: Callable) -> Case | None:
    """The call with other numbers for its real ones; None if the operator takes none or gives what is not finite."""
    if draw is whole and ("loss" in str(case.func) or has_fractions(case)):
        return None  # a kernel of a loss ends the process, others take a factor of 0.5 unless a tensor is empty
    if any(x.dtype.is_floating_point and x.dtype not in WIDE for x in tensors((case.args, case.kwargs))):
        return None
    args, kwargs = mapped((case.args, case.kwargs), lambda x: draw(x) if x.dtype in WIDE else x)
    try:
        out = as_list(case.func(*mapped(args, torch.clone), **mapped(kwargs, torch.clone)))
    except (RuntimeError, IndexError, ValueError):
        return None
    finite = all(x.to(torch.complex128).isfinite().all() for x in out if isinstance(x, torch.Tensor) and is_real(x))
    return Case(case.func, args, case.at_least if draw is signed else 1, kwargs) if finite else None


def check(make: Callable[[], Iterable[Case]], n: int) -> None:
    """Run every candidate on an axis of `n` ranks: of two with the numbers of the calls, else with both signs."""
    torch.manual_seed(0)
    cases = list(make())
    wrong = wrong_candidates(cases if n == 2 else [redrawn(case, signed) or case for case in cases], n)
    assert not wrong, "\n".join(wrong)
