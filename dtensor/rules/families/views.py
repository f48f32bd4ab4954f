"""Views and data movement: which output dim holds which factor of the input.

A view consists of groups: consecutive input dims whose sizes have the same product as some output dims. Merging and
splitting keep only the shards of the major factor, and only if it divides evenly. Tests prove what is kept by comparing
index maps.
"""

from collections.abc import Collection, Sequence
from functools import partial
from math import gcd
from typing import Any

import torch

from ...torch_private.symbolic_sizes import same_size
from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..notation import LETTERS, LibraryRule, Rule, library_rule


def groups(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[tuple[list[int], list[int]]]:
    """Divide two shapes of equal product into the smallest groups of consecutive dims of equal product.

    Dims of length 1 are in no group.
    """
    ins = [i for i, s in enumerate(before) if not same_size(s, 1)]
    outs = [i for i, s in enumerate(after) if not same_size(s, 1)]
    found: list[tuple[list[int], list[int]]] = []
    i = o = 0
    while i < len(ins) and o < len(outs):
        a, b = [ins[i]], [outs[o]]
        x, y = before[ins[i]], after[outs[o]]
        i, o = i + 1, o + 1
        while x != y:
            if (x < y and i < len(ins)) or o == len(outs):
                if i == len(ins):
                    return []
                a.append(ins[i])
                x, i = x * before[ins[i]], i + 1
            else:
                b.append(outs[o])
                y, o = y * after[outs[o]], o + 1
        found.append((a, b))
    return found


def view_text(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    """The text for a tensor of shape `before` and its view as shape `after`, and given sizes."""
    if any(isinstance(s, int) and s == 0 for s in before):
        return "*->*", {}
    ins, outs, sizes, letters = ["1"] * len(before), ["1"] * len(after), dict[str, Any](), iter(LETTERS)
    for a, b in groups(before, after):
        if len(a) > 1 and len(b) > 1:
            # Of a group of many dims to many, only a major factor that both first dims share can be followed.
            small = _common(before[a[0]], after[b[0]])
            if not same_size(small, 1):
                major, of_in, of_out = (next(letters) for _ in range(3))
                ins[a[0]], outs[b[0]] = f"({major}{of_in})", f"({major}{of_out})"
                sizes[major] = small
            continue
        names = "".join([next(letters) for _ in max(a, b, key=len)])
        for side, index in ((ins, a), (outs, b)):
            for i, factors in zip(index, [f"({names})"] if len(index) == 1 else names):
                side[i] = factors
    return f"{''.join(ins)}->{''.join(outs)}", sizes


def _common(x: Any, y: Any) -> Any:
    """The greatest common divisor; for symbolic sizes it is found only if one divides the other, else 1."""
    if isinstance(x, int) and isinstance(y, int):
        return gcd(x, y)
    return x if y % x == 0 else y if x % y == 0 else 1


@rule_for("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy", "_reshape_alias")
def view(call: Call) -> Rule | str:
    """The dims of the result are products of dims or parts of one: the outermost factor of each may be sharded."""
    (out,) = call.outputs
    assert out is not None
    if call.has("dtype"):  # not linear, and the last dim changes its length if the element size changes
        return "...->..." if out.dtype.itemsize == call["self"].dtype.itemsize else "...1->...1"
    text, sizes = view_text(call["self"].shape, out.shape)
    make = partial(LibraryRule, sizes=sizes) if sizes else library_rule
    in_order = "".join(sorted({f for f in text if f in LETTERS}))
    return make(text, linear=0, last=in_order, shape_arg="size" if call.has("size") else "shape")


def follow(call: Call, source: Sequence[int | None], whole: Collection[int] = (), **options: Any) -> Rule:
    """The rule where output dim i is input dim `source[i]`, or a new dim (None); no dim in `whole` is sharded."""
    kept = {i for i in source if i is not None and i not in whole}
    full = "".join([LETTERS[i] if i in kept else "1" for i in range(call["self"].ndim)])
    out = "".join(["1" if i is None else full[i] for i in source])
    return library_rule(f"{full}->{out}", **{"linear": 0, **options})


@rule_for("t")
def t(call: Call) -> Rule:
    """Two dims are exchanged."""
    return follow(call, list(range(call["self"].ndim))[::-1])


@rule_for("transpose", "swapaxes")
def transpose(call: Call) -> Rule:
    """Two dims are exchanged."""
    ndim = call["self"].ndim
    order: list[int | None] = list(range(ndim))
    if ndim:
        a, b = [call[name] % ndim for name in ("axis0", "axis1", "dim0", "dim1") if call.has(name)]
        order[a], order[b] = order[b], order[a]
    return follow(call, order)


@rule_for("permute")
def permute(call: Call) -> Rule:
    """Dims keep their shards in another order."""
    ndim = call["self"].ndim
    return follow(call, [d % ndim for d in call["dims"]])


@rule_for("unsqueeze")
def unsqueeze(call: Call) -> Rule:
    """A new dim of length 1 is not sharded; the others stay."""
    ndim = call["self"].ndim
    order: list[int | None] = list(range(ndim))
    order.insert(call["dim"] % (ndim + 1), None)
    return follow(call, order)


@rule_for("squeeze")
def squeeze(call: Call) -> Rule:
    """Dims of length 1 go, those of the whole tensor; the others stay."""
    shape = call["self"].shape
    given = call["dim"] if call.has("dim") else list(range(len(shape)))
    given = given if isinstance(given, (list, tuple)) else [given]
    gone = {d % len(shape) for d in given if same_size(shape[d], 1)} if shape else set()

    def local(call: LocalCall) -> Any:
        # By dimension: a shard may have length 1 where the whole has not.
        return torch.ops.aten.squeeze.dims(call["self"], sorted(gone))

    return follow(call, [i for i in range(len(shape)) if i not in gone], local=local)


@rule_for("expand")
def expand(call: Call) -> Rule:
    """New dims, and those of length 1 that become longer, are not sharded; the others stay."""
    (out,) = call.outputs
    assert out is not None
    shape = call["self"].shape
    new = out.ndim - len(shape)
    source = [None if i < new or (same_size(shape[i - new], 1) and not same_size(s, 1)) else i - new
              for i, s in enumerate(out.shape)]  # fmt: skip
    return follow(call, source, shape_arg="size")


@rule_for("constant_pad_nd")
def pad(call: Call) -> Rule:
    """Padded dims may not be sharded; padding with zeros is linear."""
    ndim, given = call["self"].ndim, call["pad"]
    padded = {ndim - 1 - i // 2 for i, p in enumerate(given) if not (isinstance(p, int) and p == 0)}
    return follow(call, range(ndim), whole=padded, linear=0 if call["value"] == 0 else ())


@rule_for("cat", "stack", "_stack")
def cat(call: Call) -> Rule:
    """All dims but the one along which tensors are joined may be sharded."""
    (out,) = call.outputs
    assert out is not None
    dim = call["dim"] % out.ndim
    full = "".join(["1" if i == dim else f for i, f in enumerate(LETTERS[: out.ndim])])
    one = full[:dim] + full[dim + 1 :] if call.name.endswith("stack") else full
    return Rule(f"{one}->{full}", linear=0)


@rule_for("repeat")
def repeat(call: Call) -> Rule:
    """A dim that is repeated may not be sharded."""
    shape, repeats = call["self"].shape, call["repeats"]
    new = len(repeats) - len(shape)
    source = [i - new if i >= new and same_size(r, 1) else None for i, r in enumerate(repeats)]
    return follow(call, source)


COMPLEX = {"view_as_real": Rule("...->...1", linear=0), "view_as_complex": Rule("...1->...", linear=0)}

rule_table(__name__, COMPLEX)

__all__ = ["COMPLEX", "follow", "groups", "view_text"]
