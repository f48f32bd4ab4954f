"""Every aten call of torch's operator database, forward and backward: all candidates of its rule by brute force.

What has no rule is a factory, stands in `WHOLE` with the reason, is taken apart by torch, or is listed here.
"""

import warnings

from dtensor.rules import WHOLE, base_name, is_in_place, rule_of
from dtensor.testing.rules.candidates import case, tensors, wrong_candidates
from dtensor.testing.rules.recording import UNINITIALISED, is_comparable, recorded
from dtensor.torch_private.core import decompositions

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


def test_every_candidate_of_every_call_is_right():
    """On four ranks, of which many shards leave some without any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases, without = [], set()
        for func, found in recorded().items():
            if rule_of(func) is None:
                without.add(func)
                continue
            for args, kwargs in found:
                if is_comparable(func, args) and all(t.numel() for t in tensors((args, kwargs))):
                    cases.append(case(func, *args, **kwargs))
        assert len({x.func for x in cases}) > 450
        wrong = wrong_candidates(cases, 4)
    assert not wrong, "\n".join(wrong)
    names = {
        base_name(f).removeprefix("aten::")
        for f in without
        if not (f in decompositions and not is_in_place(f)) and not f._can_decompose()
    }
    assert sorted(n for n in names - set(WHOLE) - set(NO_RULE) if not n.startswith(UNINITIALISED)) == []
