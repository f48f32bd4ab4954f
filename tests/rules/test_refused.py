"""Completeness over torch's operator database: whatever is right and no rule offers stands in `REASONS`.

The other way round is `test_sweep`. It runs in a process of its own: kernels get pieces that do
not fit, and not all check that. It is nightly, for what it finds is slow and never wrong; a
combination that a rule offers no more shows in every run, in `candidates.txt`.
"""

import warnings
from fnmatch import fnmatchcase

import pytest
import torch

from dtensor.rules import rule_of
from dtensor.testing import run_ranks
from dtensor.testing.rules.candidates import case, tensors
from dtensor.testing.rules.recording import is_comparable, recorded
from dtensor.testing.rules.refusals import axis_sizes, is_tried, refused

aten = torch.ops.aten

BESIDE = "linear in this operand, but another output is not: a rule makes all outputs Partial or none"
WINDOWS = "in this call the windows line up with the shards"
NO_EFFECT = "in this call the threshold changes no number"
PRODUCTS = "the exponential of a sum is a product, which overflows and takes no cheaper collective"

REASONS = {
    ("triangular_solve", "P R"): BESIDE,
    ("convolution_backward", "R * P"): BESIDE,
    ("convolution_backward", "R P R"): BESIDE,
    ("grid_sampler_?d_backward", "R P R"): BESIDE,
    ("native_group_norm", "R P P"): BESIDE,
    ("native_group_norm_backward", "R R R R P"): BESIDE,
    ("native_layer_norm", "R P P"): BESIDE,
    ("native_layer_norm_backward", "R R R R P*"): BESIDE,
    ("nll_loss_forward", "P R"): BESIDE,
    ("avg_pool*", "S(*"): WINDOWS,
    ("softshrink*", "*"): NO_EFFECT,
    ("hardshrink*", "*"): NO_EFFECT,
    ("threshold", "P"): NO_EFFECT,
    ("nan_to_num", "P"): "all numbers are finite in this call, and stay as they are",
    ("huber_loss_backward", "R P P"): "in this call no difference reaches delta, within which it is linear",
    ("roll", "S(*"): "in this call nothing is shifted",
    ("rot90", "S(*"): "of the two dimensions a quarter turn keeps one in order; the rule keeps both whole",
    ("replication_pad2d*", "S(*"): "in this call this dimension is not padded",
    ("scatter", "P R"): "in this call zeros are written, which are zeros in each part",
    ("exp", "P"): PRODUCTS,
    ("pow", "P"): PRODUCTS,
    ("pow", "R P"): PRODUCTS,
    ("xlogy", "P R"): "x log y is 0 for x = 0 also where log y is infinite, which parts of x do not know",
    ("special_xlog1py", "P R"): "x log y is 0 for x = 0 also where log y is infinite, which parts of x do not know",
    ("rrelu_with_noise_backward", "*"): "which of input and noise is read depends on the slopes and the mode",
    ("heaviside", "*"): "its second operand is read where the first is 0, which it is nowhere in this call",
    ("special_*polynomial*", "*"): "in this call the degree is small, and cut to an integer: constants and x itself",
    ("copysign", "R P"): "of the second operand only the sign is read, which a part may have as well",
    ("multi_margin_loss_backward", "P R R"): "offered for a batch of samples, and this is one",
    ("nextafter", "*"): "one step is less than the tolerance of the comparison, so it seems the identity",
}
"""(aten operator, states of its operands), both as shell patterns -> why a right combination is not offered."""


def refusals(rank):
    """What is right and not offered: (operator, states, text); and how many operators were tried."""
    found, tried = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for func, calls in recorded().items():
            if rule_of(func) is None:
                continue
            for args, kwargs in calls:
                one = case(func, *args, **kwargs)
                if is_tried(one) and is_comparable(func, args) and all(t.numel() for t in tensors((args, kwargs))):
                    tried.add(str(func))
                    found += [
                        (r.operator.split(".")[1], r.pattern, str(r)) for n in axis_sizes(one) for r in refused(one, n)
                    ]
    return found, tried


def reason(operator, pattern):
    return next((k for k in REASONS if fnmatchcase(operator, k[0]) and fnmatchcase(pattern, k[1])), None)


@pytest.mark.nightly
def test_what_is_refused_is_wrong_or_has_a_reason():
    found, tried = run_ranks(refusals, 1, fresh=True)[0]
    assert len(tried) > 380
    unexplained = sorted({text for operator, pattern, text in found if reason(operator, pattern) is None})
    assert not unexplained, "\n".join(unexplained)
    idle = set(REASONS) - {reason(operator, pattern) for operator, pattern, _ in found}
    assert not idle, f"these explain nothing any more: {sorted(idle)}"


def test_a_right_combination_that_a_rule_does_not_offer_is_found():
    x = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    found = refused(case(aten.exp.default, x), 2)
    assert [(r.inputs, r.outputs) for r in found] == [(("sum",), ("product",))]
    assert str(found[0]) == "aten.exp.default [[4, 4]] on 2: P -> P(product)"
    found = refused(case(aten.rot90.default, x), 2)
    assert [(r.inputs, r.outputs) for r in found] == [((0,), (1,))]


def test_what_the_rule_offers_and_what_is_wrong_is_not_found():
    x, y = torch.rand(4, 6, dtype=torch.float64), torch.rand(6, 2, dtype=torch.float64)
    assert refused(case(aten.mm.default, x, y), 2) == []
    assert refused(case(aten.relu.default, x), 2) == []
    assert refused(case(aten.isnan.default, x), 2) == []  # the same everywhere: tells nothing
