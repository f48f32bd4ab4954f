"""Every aten call of torch's operator database, forward and backward: all candidates of its rule by brute force.

What has no rule is a factory, stands in `WHOLE` with the reason, is taken apart by torch, or is listed here.
"""

import warnings
from collections import defaultdict

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor._torch import decompositions
from dtensor.rules import WHOLE, base_name, is_in_place, rule_of
from dtensor.testing.candidates import case, mapped, tensors, wrong_candidates

SAMPLES, CALLS, ELEMENTS = 2, 2, 600
"""Samples of each operator of the database, calls of each aten operator, elements in a call."""

SKIPPED = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
"""Tags of operators that cannot be compared: each call gives other numbers, or changes the shape of its argument."""
UNINITIALISED = ("empty", "new_empty", "resize", "_efficientzerotensor")
NO_RULE = {
    "_sparse_mm_reduce_impl": "sparse",
    "_sparse_mm_reduce_impl_backward": "sparse",
    "_to_sparse": "sparse",
    "sparse_mask": "sparse",
    "sparse_sampled_addmm": "sparse",
    "_scaled_mm_v2": "not used by a public function of this torch on CPU",
    "resize_as": "changes its argument's shape and has no view to stand for",
    "resize": "changes its argument's shape and has no view to stand for",
}


class Recorder(TorchDispatchMode):
    """Keeps the first calls of each aten operator, by the shapes of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(dict)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        wanted = func.namespace == "aten" and given and sum(t.numel() for t in given) < ELEMENTS
        if not wanted or any(t.layout is not torch.strided for t in given):
            return func(*args, **kwargs)
        key = str(mapped((args, kwargs), lambda t: list(t.shape)))
        kept = mapped((args, kwargs), lambda t: t.detach().clone())
        out = func(*args, **kwargs)
        found = self.calls[func]
        if len(found) < CALLS:
            found.setdefault(key, kept)
        return out


def record():
    recorder = Recorder()
    for op in op_db:
        torch.manual_seed(0)
        supported = op.supported_dtypes("cpu")
        dtype = next((d for d in (torch.float64, torch.float32, *supported) if d in supported), None)
        if dtype is None:
            continue
        differentiable = op.supports_autograd and dtype.is_floating_point
        for sample in list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))[:SAMPLES]:
            try:
                with recorder:
                    run(op, sample, differentiable)
            except (RuntimeError, AssertionError, TypeError):
                continue  # not for this device
    return recorder.calls


def run(op, sample, differentiable):
    outs = [o for o in tensors(op(sample.input, *sample.args, **sample.kwargs)) if o.requires_grad]
    ins = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    if differentiable and outs and ins:
        torch.autograd.grad(outs, ins, [torch.randn_like(o) for o in outs], allow_unused=True)


def is_tried(func, args):
    masks = any(t.dtype in (torch.bool, torch.uint8) for a in args if isinstance(a, (list, tuple)) for t in tensors(a))
    out = any(a.is_out for a in func._schema.arguments)
    name = base_name(func).removeprefix("aten::")
    return not (out or masks or name.startswith(UNINITIALISED) or SKIPPED & set(func.tags))


def test_every_candidate_of_every_call_is_right():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = record()
        cases, without = [], set()
        for func, found in calls.items():
            if rule_of(func) is None:
                without.add(func)
                continue
            for args, kwargs in found.values():
                if is_tried(func, args) and all(t.numel() for t in tensors((args, kwargs))):
                    cases.append(case(func, *args, **kwargs))
        assert len({x.func for x in cases}) > 450
        wrong = wrong_candidates(cases, 3)
    assert not wrong, "\n".join(wrong)
    names = {
        base_name(f).removeprefix("aten::")
        for f in without
        if not (f in decompositions and not is_in_place(f)) and not f._can_decompose()
    }
    assert sorted(n for n in names - set(WHOLE) - set(NO_RULE) if not n.startswith(UNINITIALISED)) == []
