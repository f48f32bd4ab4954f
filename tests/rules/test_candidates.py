"""What the rules offer, as text: of every call that the tests of the families make, each candidate, and what else is
said of the call.

The other tests find what is offered and wrong. What is right and offered no more would only be slower, so it is listed
here, in a file for each family: `EXPECTTEST_ACCEPT=1 pytest tests/rules/test_candidates.py` rewrites `candidates/`;
read the diff.
"""

import difflib
import importlib
import inspect
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from dtensor.rules import FAMILIES, RULES, base_name, families, rule_of
from dtensor.rules.call import BY_VALUE
from dtensor.rules.families.pointwise import FALLING, LINEAR, RISING
from dtensor.rules.families.random import FILLS, LIKE
from dtensor.rules.notation import LETTERS
from dtensor.rules.rule import candidates, shares_dim
from dtensor.testing.rules.candidates import (
    Case,
    OneAxis,
    call_and_rule,
    check_sizes,
    tensors,
    wrong_candidates,
)
from dtensor.testing.rules.candidates import case as c
from dtensor.testing.rules.candidates import floats as f
from dtensor.testing.rules.candidates import integers as ints
from tests.rules.checking import check, redrawn, whole

HERE = Path(__file__).parent
TABLES = HERE / "candidates"
aten = torch.ops.aten
CLAMPS = {"clamp", "clamp_min", "clamp_max"}


def further_cases():
    """Calls that no other test of this folder makes."""
    x, y = f(4, 6), f(4, 6)
    yield from [
        c(op, x) for op in (aten.absolute.default, aten.detach.default, aten.alias.default, aten.hardswish.default)
    ]
    yield c(aten.positive.default, x)
    yield from [c(op, x, y) for op, y in ((aten.true_divide.Tensor, y), (aten.true_divide.Scalar, 3.0))]
    yield from [c(op, x, y) for op in (aten.multiply.Tensor, aten.divide.Tensor, aten.subtract.Tensor)]
    yield from [c(getattr(aten, name).default, x) for name in sorted((RISING | FALLING) - CLAMPS)]
    yield from [c(op, x, 0.7) for op in (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)]
    yield from [c(op, x, 3.0) for op in (aten.div.Scalar, aten.mul.Scalar)]
    yield c(aten._foreach_div.Scalar, [x], 3.0)
    yield c(aten.ldexp.Tensor, x, ints(3, 4, 6))
    yield c(aten.tanh_backward.default, x, y)
    yield c(aten.conj_physical.default, torch.complex(x, y))
    yield c(aten.maximum.default, x, f())
    yield c(aten.minimum.default, x, y)
    yield c(aten.sub.Tensor, x, y, alpha=2)
    yield c(aten.lift_fresh.default, x)
    yield from [c(op, x, 1, True) for op in (aten.argmin.default, aten.argsort.default)]
    yield c(aten.nanmedian.dim, x, 1)
    yield from [c(aten.linalg_vector_norm.default, x, p, dim) for p in (1, 2, float("inf"), 0) for dim in (None, [0])]
    # Products.
    yield c(aten.vdot.default, f(5), f(5))
    yield c(aten.ger.default, f(5), f(4))
    yield from [c(aten.addmm.default, bias, f(5, 6), f(6, 1)) for bias in (f(1), f(5, 1), f())]
    yield c(aten.addmm.default, f(1, 3), f(1, 6), f(6, 3))
    # Losses.
    yield from [c(op, x, y, r) for op in (aten.smooth_l1_loss.default, aten.huber_loss.default) for r in (0, 1, 2)]
    yield from [
        c(aten.binary_cross_entropy_with_logits.default, x, y, w, None, r) for w in (None, f(6)) for r in (0, 1)
    ]
    yield c(aten.mse_loss.default, f(4, 1), f(1, 6), 1)
    target = torch.tensor([0, 2, 1, -100])
    for reduction in (0, 1, 2):
        yield c(aten.nll_loss_forward.default, f(4, 3), target, f(3), reduction, -100)
        wide, many = f(4, 3, 2, 5), target[:, None, None].expand(4, 2, 5).contiguous()
        yield c(aten.nll_loss2d_forward.default, wide, many, None, reduction, -100)
        total = torch.tensor(3.0, dtype=torch.float64)
        yield c(
            aten.nll_loss_backward.default,
            f(4) if reduction == 0 else f(),
            f(4, 3),
            target,
            f(3),
            reduction,
            -100,
            total,
        )
        yield c(aten.nll_loss_backward.default, f(), f(3), torch.tensor(1), None, reduction, -100, total)
    # Views.
    for before, after in (
        *(((4, 6), (2, 2, 6)), ((4, 6), (4, 2, 3)), ((2, 3, 4), (6, 4)), ((2, 3, 4), (2, 12)), ((6, 4), (4, 6))),
        *(
            ((4, 1, 6), (4, 6)),
            ((4, 6), (1, 24, 1)),
            ((2, 2, 3), (4, 3)),
            ((1,), ()),
            ((0, 3), (3, 0)),
            ((2, 6, 5), (4, 3, 5)),
        ),
    ):
        yield c(aten.reshape.default, f(*before), list(after))
        yield c(aten._unsafe_view.default, f(*before), list(after))
    yield c(aten.transpose.int, f(4, 5, 6), -2, 0)
    yield c(aten.transpose.int, f(), 0, -1)
    yield c(aten.permute.default, f(4, 5, 6), [-1, 0, 1])
    yield from [c(aten.unsqueeze.default, x, dim) for dim in (0, 1, 2, -1, -3)]
    yield from [c(aten.squeeze.dim, f(1, 4, 1), dim) for dim in (0, 1, 2, -1, -3)]
    yield c(aten.squeeze.default, f(1, 4, 1))
    yield c(aten.squeeze.dims, f(1, 4, 1), [0, 1])
    yield c(aten.squeeze.dim, f(), 0)
    yield from [c(aten.expand.default, f(1, 6), size) for size in ([4, 6], [1, 6], [3, 1, 6], [3, 4, -1])]
    for pad in ([1, 0], [0, 2], [0, 0, 1, 1], [0, 0], [-1, 0]):
        yield from [c(aten.constant_pad_nd.default, x, pad, value) for value in (0.0, 2.0)]
    for dim in (0, 1, -1):
        yield c(aten.cat.default, [x, y, f(*((2, 6) if dim == 0 else (4, 2)))], dim)
        yield c(aten.stack.default, [x, y], dim)
    yield c(aten.cat.default, [x, f(0)], 0)
    yield from [c(aten.repeat.default, x, times) for times in ([1, 2], [2, 1], [3, 1, 1], [1, 1])]
    yield c(aten.view_as_real.default, torch.complex(x, y))
    yield c(aten.view_as_complex.default, f(4, 6, 2))
    # Parts.
    yield c(aten.slice.Tensor, x, 1, 1, 5, 2)
    yield from [c(aten.slice.Tensor, x, dim) for dim in (0, -1)]
    yield from [c(aten.select.int, f(4, 5, 6), dim, -1) for dim in (0, 1, -1)]
    yield c(aten.diagonal.default, f(4, 5, 6), 1, 0, 2)
    yield c(aten.diagonal.default, f(4, 5, 6), 0, -1, 0)
    yield from [c(aten.unfold.default, f(4, 6, 2), dim, 3, 1) for dim in (0, 1, -2)]
    yield c(aten.slice_backward.default, f(4, 2), [4, 6], 1, 1, 3, 1)
    yield c(aten.select_backward.default, f(4), [4, 6], -1, 2)
    yield c(aten.diagonal_backward.default, f(5, 4), [4, 5, 4], 0, 0, 2)
    yield c(aten.slice_scatter.default, x, f(4, 2), 1, 1, 3)
    yield c(aten.select_scatter.default, x, f(4), 1, 2)
    yield c(aten.as_strided.default, x, [4, 6], [6, 1])
    yield c(aten.as_strided.default, x, [4, 1, 6], [6, 6, 1])
    yield c(aten.as_strided.default, f(4, 1, 6), [4, 6], [6, 1], 0)
    yield c(aten.as_strided.default, x, [2, 6], [12, 1])
    yield c(aten.as_strided.default, x, [4, 6], [6, 1], 0)
    yield c(aten.as_strided.default, x, [3, 6], [6, 1], 6)
    yield c(aten.as_strided.default, f(0, 6), [0, 6], [6, 1])
    # Indices.
    i, j, rows = torch.tensor([2, 0, 1]), torch.tensor([[1], [3]]), f(5, 4, 6)
    for indices in ([i], [None, i], [i, i], [None, i, i], [i, None, i], [i, j], [None, None, i], [j], [None, j, i]):
        yield c(aten.index.Tensor, rows, indices)
        read = rows[tuple(slice(None) if at is None else at for at in indices)]
        for accumulate in (False, True):
            if accumulate or all(at is None or at is i for at in indices):
                yield c(aten.index_put.default, rows, indices, torch.rand_like(read), accumulate)
                yield c(aten.index_put.default, rows, indices, f(), accumulate)
                yield c(aten.index_put.default, rows, indices, f(*read.shape[1:]), accumulate)
    yield c(aten.index.Tensor, f(2, 4, 3, 5), [None, i, None, i])
    yield c(aten.index.Tensor, f(2, 4, 3, 5), [None, None, torch.tensor([2, 0]), torch.tensor([[1], [4]])])
    yield c(aten.index_put.default, x, [x > 1], f())
    yield c(aten.index_put.default, x, [torch.tensor([True, False, True, True])], f(), False)
    for dim in (0, -1):
        yield c(aten.index_select.default, x, dim, i)
        yield c(aten.gather.default, x, dim, ints(4, 3, 5))
    yield c(aten.index_select.default, f(), 0, torch.tensor([0]))
    yield from [c(aten.index_select.default, f(6), dim, i) for dim in (0, -1)]
    yield from [c(aten.gather.default, f(6), dim, i) for dim in (0, -1)]
    yield from [c(op, f(6), 0) for op in (aten.cumsum.default, aten.argsort.default)]
    yield from [c(op, f(6), -1) for op in (aten.cumsum.default, aten.sort.default)]
    yield c(aten.select.int, f(6), -1, 2)
    yield c(aten.unfold_backward.default, f(1), [], 0, 1, 1)
    yield c(aten.unfold_backward.default, f(4, 4, 3), [4, 6], 1, 3, 1)
    yield c(aten.unfold.default, f(), 0, 1, 1)
    yield c(aten.slice.Tensor, f(6), -1, 1, 4)
    yield c(aten.masked_scatter_backward.default, x, x > 1, [4, 6])
    yield c(aten.take.default, x, i)
    for accumulate in (False, True):
        yield c(aten.put.default, x, i, f(3), accumulate)
        yield c(aten.put.default, x, i, f(1, 3), accumulate)
    # Like others.
    yield c(aten.new_zeros.default, x, [4, 6])
    yield c(aten.new_full.default, x, [4, 6, 1], 2.0)
    yield c(aten.new_full.default, x, [4, 5], 2.0)
    yield from [c(op, f(3, 4, 5), k) for op in (aten.tril.default, aten.triu.default) for k in (0, 1)]
    # Solutions.
    a = torch.eye(3, dtype=torch.float64).expand(3, 3, 3) + f(3, 3, 3)
    for b, left in ((f(3, 3), True), (f(3, 3, 2), True), (f(3, 2, 3), False), (f(3), True)):
        if b.shape != (3,):
            yield c(aten._linalg_solve_ex.default, a, b, left=left)
    yield from [c(aten._linalg_solve_ex.default, a, f(3, n)) for n in (6, 12)]  # as vectors on two ranks, on four
    for b in (f(3, 4), f(3, 2), f(1, 3, 2)):
        yield c(aten._linalg_solve_ex.default, a[:2], b)
    yield c(aten._linalg_solve_ex.default, a[:2], f(4, 3), left=False)
    yield from [c(aten._linalg_solve_ex.default, a[0], b) for b in (f(2, 3, 4), f(4, 3, 1))]
    yield c(aten._linalg_solve_ex.default, a[0], f(3))
    yield c(aten._linalg_solve_ex.default, a[0], f(3, 2))


def drawn_cases():
    """Random numbers: which ones it is the task of other tests to look at."""
    x, noise = f(4, 6), f(4, 6)
    numbers = {"bernoulli_": (0.3,), "geometric_": (0.3,)}
    for name in FILLS:
        yield c(getattr(getattr(aten, name), "float" if name == "bernoulli_" else "default"), x, *numbers.get(name, ()))
    yield c(aten.bernoulli_.Tensor, x, f(6) / 2)
    for name in LIKE:
        yield c(getattr(aten, name).default, x, *([9] if name == "randint_like" else []))
    yield from [c(op, x / 2, *p) for op, *p in ((aten.bernoulli.default,), (aten.bernoulli.p, 0.3))]
    yield from [
        c(aten.normal.float_Tensor, 1.0, x),
        c(aten.normal.Tensor_float, x),
        c(aten.normal.Tensor_Tensor, x, f(6)),
    ]
    yield from [c(aten.native_dropout.default, x, p, train) for p in (0.0, 0.5) for train in (True, False)]
    for training in (True, False):
        for op in (aten.rrelu_with_noise, aten.rrelu_with_noise_, aten.rrelu_with_noise_functional):
            yield c(op.default, x, noise, 0.1, 0.3, training)


def of_lists_cases():
    """Fused steps, as dispatch calls them for each parameter; `test_optimizer.py` runs them."""
    p, step, flags = f(4, 6), f(), {"weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "amsgrad": False}
    sgd = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    for op in (aten._fused_adam_.default, aten._fused_adamw_.default):
        yield c(op, [p], [p], [p], [p], [], [step], **adam, **flags)
        yield c(op, [p], [p], [p], [p], [p], [step], **{**adam, "amsgrad": True}, **flags)
    yield c(aten._fused_adagrad_.default, [p], [p], [p], [step], lr=0.1, lr_decay=0.0, **flags)
    yield c(aten._fused_sgd_.default, [p], [p], [p], weight_decay=0.0, maximize=False, **sgd)


def memory_cases():
    """Whatever lay in memory."""
    x = f(4, 6)
    yield from [c(aten.empty_like.default, x), c(aten.new_empty.default, x, [4, 6]), c(aten.new_empty.default, x, [4])]
    yield from [c(aten.new_empty_strided.default, x, *sizes) for sizes in (([4, 6], [1, 4]), ([6], [1]))]


def of_gpus_cases():
    """Kernels that a CPU does not have."""
    q, k, v, bias, lse = *[f(4, 6, 3, 8).float() for _ in range(3)], f(4, 6, 3, 3).float(), f(4, 6, 3).float()
    seed, ends = [ints(9) for _ in range(2)], [torch.zeros(0, dtype=torch.int32)] * 2
    for dropout in (0.0, 0.5):
        yield c(aten._scaled_dot_product_flash_attention.default, q, k, v, dropout)
        for mask in (None, bias, bias[:1]):
            yield c(aten._scaled_dot_product_efficient_attention.default, q, k, v, mask, True, dropout)
            yield c(aten._scaled_dot_product_cudnn_attention.default, q, k, v, mask, True, dropout)
    lengths = (*ends, 3, 3, 0.0, False)
    yield c(aten._scaled_dot_product_flash_attention_backward.default, q, q, k, v, q, lse, *lengths, *seed)
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    yield c(efficient, q, q, k, v, bias, q, lse, *seed, 0.0, [True] * 4)
    yield c(aten._scaled_dot_product_cudnn_attention_backward.default, q, q, k, v, q, lse, *seed, bias, *lengths)
    x, w = f(4, 6, 5).float(), f(6).float()
    for library in ("cudnn", "miopen"):
        forward, backward = (getattr(aten, f"{library}_batch_norm{end}").default for end in ("", "_backward"))
        yield from [c(forward, x, w, w, w, w, training, 0.1, 1e-5) for training in (True, False)]
        yield c(backward, x, x, w, w, w, w, w, 1e-5, *([ends[0].byte()] if library == "cudnn" else []))
    for mask in ([True, True], [False, True], [True, False]):
        yield c(aten._fused_rms_norm_backward.default, f(4, 6), f(4, 6), [6], f(4, 1), f(6), mask)


NOT_RUN = (".of_lists_cases", ".drawn_cases", ".memory_cases", ".of_gpus_cases")
"""Calls of which only what the rules offer is looked at."""


def every_call():
    """Every case of this folder, with the name of what makes it."""
    for path in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.rules.{path.stem}")
        for name, make in sorted(vars(module).items()):
            own = inspect.isgeneratorfunction(make) and make.__module__ == module.__name__
            if own and name.endswith("_cases") and not inspect.signature(make).parameters:
                torch.manual_seed(0)
                yield from ((f"{path.stem.removeprefix('test_')}.{name}", case) for case in make())


def said(value):
    """An argument as text: of a tensor its shape, and its dtype if that is none of the usual ones."""
    match value:
        case torch.Tensor():
            dtype = {torch.float64: "", torch.int64: "int", torch.bool: "bool"}.get(value.dtype)
            return f"{str(value.dtype).removeprefix('torch.') if dtype is None else dtype}{list(value.shape)}"
        case list() | tuple():
            return f"({' '.join(map(said, value))})"
        case frozenset() | set():
            return f"{{{' '.join(sorted(map(said, value)))}}}"
        case dict():
            return f"{{{' '.join([f'{k}:{said(v)}' for k, v in sorted(value.items())])}}}"
        case float():
            return f"{value:g}"
    return str(value).removeprefix("torch.")


def offered(case):
    """The call, and what its rule offers, as one line in the notation.

    Letters are the factors that some candidate shards, in the order in which they are tried, in parentheses if only
    evenly. Behind the text stand what makes results partial (`b:sum`, or for each result; `b:+0` for operands that are
    added), the operands in which it is linear, and whatever else candidates do not tell.
    """
    call, rule = call_and_rule(case, OneAxis(2))
    check_sizes(case, call, rule)
    table = candidates(rule)
    names = {c.factors[0]: LETTERS[i] for i, c in enumerate(x for x in table if len(x.factors) == 1)}
    given = [*map(said, case.args), *[f"{name}={said(x)}" for name, x in sorted(case.kwargs.items())]]
    terms = [["1"] * x.dim() for x in tensors((case.args, case.kwargs))]
    results = [["1"] * o.ndim if o else ["-"] for o in call.outputs]
    told: list[str] = []
    for found in table:
        ops = [x if isinstance(x, str) else "-" for x in found.outputs]
        if not found.factors:
            told += [
                f"{op}:{''.join([str(i) for i, x in enumerate(found.inputs) if x])}->{ops[0]}"
                for op in {*found.inputs} - {None}
            ]
            continue
        if len(found.factors) > 1:
            told.append(f"together={''.join([names[f] for f in found.factors])}")
            continue
        factor = next(iter(found.factors))
        name = names[factor]
        for dims, state in zip((*terms, *results), (*found.inputs, *found.outputs)):
            if isinstance(state, int):
                sign = f"({name})" if shares_dim(rule, factor) else name
                dims[state] = sign if dims[state] == "1" else dims[state] + sign
        added = [f"{name}:+{i}" for i, x in enumerate(found.inputs) if isinstance(x, str)]
        reduced = [] if set(ops) == {"-"} else [f"{name}:{ops[0] if len(set(ops)) == 1 else ','.join(ops)}"]
        told += [*added, *reduced]
    summed = [t.removeprefix("sum:").removesuffix("->sum") for t in told if t.startswith("sum:")]
    linear = [g for g in summed if f"avg:{g}->avg" in told]
    told = [t for t in told if not any(t in (f"sum:{g}->sum", f"avg:{g}->avg") for g in linear)]
    told += [f"linear={','.join(linear)}"] if linear else []
    text = "->".join([",".join(map("".join, side)) for side in (terms, results)])
    run = getattr(rule.local, "func", rule.local)  # of a partial what it calls
    others = {
        "local": run and run.__name__,
        "across": rule.across and rule.local and sorted(names.get(f, "") for f in rule.across),
        "all_reduces": {names[f]: n for f, n in rule.all_reduces.items() if f in names},
        "inside": {"".join([names[f] for f in fs]): sent for fs, sent in rule.inside.items() if names.keys() >= {*fs}},
        "refuses_empty": rule.local and sorted(names[f] for f in rule.refuses_empty if f in names),
        **{name: getattr(rule, name) for name in ("written", "unread", "home", "shape_arg")},
    }
    told += [f"{name}={said(x)}" for name, x in others.items() if x]
    return f"{case.func} {' '.join(given)}: {' '.join([text, *told])}"


def family(func):
    """The module of the rule of an operator."""
    make = rule_of(func)
    assert make is not None, func
    return make.__module__.rpartition(".")[2]


def test_what_rules_offer():
    tables: dict[str, dict[str, None]] = {}
    for _, case in every_call():
        tables.setdefault(family(case.func), {})[offered(case)] = None
    if os.environ.get("EXPECTTEST_ACCEPT"):
        shutil.rmtree(TABLES, ignore_errors=True)
        TABLES.mkdir()
        for name, lines in tables.items():
            (TABLES / f"{name}.txt").write_text("\n".join(lines) + "\n")
    assert {path.stem for path in TABLES.glob("*.txt")} == set(tables)
    for name, lines in tables.items():
        old = (TABLES / f"{name}.txt").read_text().splitlines()
        assert old == [*lines], "\n".join(difflib.unified_diff(old, [*lines], name, "as it is", lineterm="", n=2))


def test_every_family_has_calls():
    """In a table of its name, which is made of what the cases of this folder call."""
    names = {module.__name__.rpartition(".")[2] for module in FAMILIES}
    tables = {path.stem for path in TABLES.glob("*.txt")}
    assert not (missing := names - tables), f"no case in tests/rules calls an operator of these families: {missing}"
    assert not (idle := tables - names), f"these tables belong to no module of FAMILIES: {idle}"


def test_every_family_is_listed():
    """A module of the folder that is not in FAMILIES would fill no table."""
    helpers = {"replicated", "row_lookup"}
    modules = {path.stem for path in Path(families.__path__[0]).glob("*.py")} - {"__init__"}
    assert modules - helpers == {module.__name__.rpartition(".")[2] for module in FAMILIES}


ELSEWHERE = {
    **dict.fromkeys(["convolution_overrideable", "convolution_backward_overrideable"], "for devices outside of torch"),
    "_pin_memory": "needs a GPU",
}
"""Operators of aten with a rule that no case of this folder calls, and why."""


def test_every_rule_has_a_call():
    called = {base_name(case.func) for _, case in every_call()}
    names = {name.partition(".")[0].removeprefix("aten::") for name in RULES if name.startswith("aten::")}
    there = {name for name in names if hasattr(aten, name) or hasattr(aten, f"{name}_")}
    assert len(there) > 300
    missing = {name for name in there if f"aten::{name}" not in called}
    assert not missing - set(ELSEWHERE), f"no case of tests/rules calls {missing - set(ELSEWHERE)}; write one"
    assert not set(ELSEWHERE) - missing, f"cases call {set(ELSEWHERE) - missing}, so ELSEWHERE need not list them"


def test_everything_linear_has_a_call():
    called = {f"{base_name(case.func)}.{case.func._overloadname}".removeprefix("aten::") for _, case in every_call()}
    called |= {name.partition(".")[0] for name in called}
    assert set(LINEAR) - called == set()


def with_floats(value, number):
    """`value` with `number` for each float but zero in it, also in lists and dicts."""
    match value:
        case float():
            return number if value else value
        case dict():
            return {k: with_floats(x, number) for k, x in value.items()}
        case list() | tuple():
            return type(value)(with_floats(x, number) for x in value)
    return value


def test_rules_do_not_look_at_floats():
    """But for whether one is zero: a decision is kept for all others, unless the rule says that it reads them."""
    changed = 0
    for _, case in every_call():
        args, kwargs = (with_floats(given, 0.5) for given in (case.args, case.kwargs))
        if (args, kwargs) == (case.args, case.kwargs) or base_name(case.func) in BY_VALUE:
            continue
        changed += 1
        other = Case(case.func, args, kwargs=kwargs)
        assert offered(case).split(": ", 1)[1] == offered(other).split(": ", 1)[1], case.func
    assert changed > 100


def test_candidates_are_right_for_integers():
    """Of which there is a largest one, and which some operators round."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        safe = [case for maker, case in every_call() if not maker.endswith(NOT_RUN)]
        cases = [case for case in [redrawn(case, whole) for case in safe] if case is not None]
        assert len(cases) > 500
        wrong = wrong_candidates(cases, 4)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("n", [2, 4])
def test_further_candidates_are_right(n):
    check(further_cases, n)
