"""Plans against an exhaustive search that knows nothing of them: every layout, every step, every pair."""

import heapq
from collections import defaultdict
from functools import lru_cache
from itertools import combinations, permutations, product
from math import ceil, inf, log2, prod

import pytest
import sympy

from dtensor.layout import planner, transitions
from dtensor.layout.layout import Layout
from dtensor.layout.planner import plan
from dtensor.layout.transitions import Space
from dtensor.prices.links import INTER, INTRA, Link, Network, seconds, wire_bytes


def layouts(mesh_ndim, ndim, ops=("sum",)):
    """All layouts: each axis on a dimension, partial or replicated, in each order."""
    found = []
    for where in product([*range(ndim), None, *ops], repeat=mesh_ndim):
        cuts = [[a for a in range(mesh_ndim) if where[a] == d] for d in range(ndim)]
        partial = tuple((a, w) for a, w in enumerate(where) if isinstance(w, str))
        found += [Layout.make(mesh_ndim, dims, partial) for dims in product(*[tuple(permutations(c)) for c in cuts])]
    return found


def subsets(axes):
    return [g for k in range(2, len(axes) + 1) for g in combinations(axes, k)]


def everything_merged(sizes, links=INTRA):
    """The network in which every set of axes has a group."""
    return Network.of(sizes, links, subsets([a for a, n in enumerate(sizes) if n > 1]))


def chunk(begin, end, n, index):
    """Where chunk `index` of n lies, as torch.chunk cuts."""
    step = -(-(end - begin) // n)
    return min(begin + index * step, end), min(begin + (index + 1) * step, end)


class Exhaustive:
    """All steps between all layouts of a tensor, found by carrying each step out on the ranges that ranks hold.

    Nothing is known of which steps make sense: each operator is tried on each group and each dimension, and it is a
    step if what the ranks hold afterwards is what some layout says.
    """

    def __init__(self, lengths, network, ops=("sum",)):
        self.lengths, self.network = lengths, network
        sizes = network.sizes
        self.ranks = list(product(*map(range, sizes)))
        self.layouts = layouts(len(sizes), len(lengths), ops)
        self.held = {x: tuple(self.ranges(x, at) for at in self.ranks) for x in self.layouts}
        self.named = defaultdict(list)
        for x in self.layouts:
            self.named[self.held[x], self.reductions(x)].append(x)
        self.groups = [(a,) for a, n in enumerate(sizes) if n > 1] + sorted(network.merged)
        self.ops = ops
        self.price = lru_cache(None)(self.price)
        self.sizes = {x: self.size(held) for x, held in self.held.items()}
        self.edges = {x: list(self.steps(x)) for x in self.layouts}

    def ranges(self, layout, at):
        found = []
        for length, axes in zip(self.lengths, layout.dims):
            span = (0, length)
            for a in axes:
                span = chunk(*span, self.network.sizes[a], at[a])
            found.append(span)
        return tuple(found)

    def reductions(self, layout):
        return tuple(p for p in layout.partial if self.network.sizes[p[0]] > 1)

    def size(self, held):
        """Elements of a shard that is as long as the longest along each dimension."""
        return prod(max(h[d][1] - h[d][0] for h in held) for d in range(len(self.lengths)))

    def members(self, group):
        """The ranks of each group over these axes, in order."""
        rows = defaultdict(list)
        for index, at in enumerate(self.ranks):
            rows[tuple(x for a, x in enumerate(at) if a not in group)].append((tuple(at[a] for a in group), index))
        return [[index for _, index in sorted(row)] for row in rows.values()]

    def steps(self, x):
        """(operator, group, bytes priced, layout after) of all steps out of `x`."""
        held, partial = self.held[x], self.reductions(x)
        for group in self.groups:
            rows, n = self.members(group), self.network.size(group)
            open_ops = {dict(partial).get(a) for a in group}
            if open_ops == {None}:
                yield from self.gathers(held, partial, rows, n, group)
                yield from self.scatters("shard", held, partial, rows, n, group, 1)
                if len(group) > 1:
                    yield from self.exchanges(x, rows, group)
            elif len(open_ops) == 1 and None not in open_ops:
                (op,) = open_ops
                later = [o for a, o in partial if a > group[0] and a not in group]
                if all(o == op or {o, op} == {"sum", "avg"} for o in later):
                    rest = tuple(p for p in partial if p[0] not in group)
                    yield from self.found("all_reduce", group, self.size(held), held, rest)
                    yield from self.scatters("reduce_scatter", held, rest, rows, n, group, n)
            for op in self.ops:
                if len(group) == 1 and open_ops == {None} and self.equal(held, rows):
                    rest = tuple(sorted([*partial, (group[0], op)]))
                    if op != "product" or not any(o == "sum" and a > group[0] for a, o in partial):
                        yield from self.found("partial", group, self.size(held), held, rest)

    def equal(self, held, rows):
        return all(held[i] == held[row[0]] for row in rows for i in row)

    def found(self, op, group, size, held, partial):
        for y in self.named.get((tuple(held), partial), ()):
            yield op, group, size, y

    def gathered(self, held, rows, n, d):
        """What ranks hold after a gather along `d`; None where the pieces are not the chunks of what they make."""
        after = list(held)
        for row in rows:
            begin, end = held[row[0]][d][0], held[row[-1]][d][1]
            for index, rank in enumerate(row):
                rest = held[rank][:d] + held[rank][d + 1 :]
                if rest != held[row[0]][:d] + held[row[0]][d + 1 :] or held[rank][d] != chunk(begin, end, n, index):
                    return None
                after[rank] = (*held[rank][:d], (begin, end), *held[rank][d + 1 :])
        return after

    def gathers(self, held, partial, rows, n, group):
        for d in range(len(self.lengths)):
            after = self.gathered(held, rows, n, d)
            if after is not None:
                yield from self.found("all_gather", group, n * self.size(held), after, partial)
                for e in range(len(self.lengths)):
                    if e != d:
                        yield from self.scatters("all_to_all", after, partial, rows, n, group, n, held, d)

    def scatters(self, name, held, partial, rows, n, group, count, before=None, gathered=None):
        if not self.equal(held, rows):
            return
        for d in range(len(self.lengths)):
            if d == gathered:
                continue
            after, sent = list(held), list(held)
            for row in rows:
                for index, rank in enumerate(row):
                    piece = chunk(*held[rank][d], n, index)
                    after[rank] = (*held[rank][:d], piece, *held[rank][d + 1 :])
                    source = held if before is None else before
                    sent[rank] = (*source[rank][:d], piece, *source[rank][d + 1 :])
            yield from self.found(name, group, count * self.size(sent), after, partial)

    def exchanges(self, x, rows, group):
        """Every layout in which the ranks of each group hold the blocks they hold now, in another order."""
        held, partial = self.held[x], self.reductions(x)
        shapes = {tuple(b - a for a, b in h) for h in held}
        for y in self.layouts:
            if len(shapes) != 1 or self.reductions(y) != partial or self.held[y] == held:
                continue
            if all(sorted(held[i] for i in row) == sorted(self.held[y][i] for i in row) for row in rows) and all(
                len({held[i] for i in row}) == len(row) for row in rows
            ):
                yield "collective_permute", group, self.size(held), y

    def price(self, op, group, size, itemsize):
        """Seconds and bytes, from the formulas written out once more."""
        n, links = self.network.size(group), [self.network.links[a] for a in group]
        wire = {"all_reduce": 2 * (n - 1) / n, "collective_permute": 1}.get(op, (n - 1) / n) * size * itemsize
        rounds = {"all_reduce": 2 * ceil(log2(n)), "collective_permute": 1}.get(op, ceil(log2(n)))
        if op in ("shard", "partial"):
            return max(k.launch for k in links) + size * itemsize / min(k.memory for k in links), 0.0
        slowest = max(k.start for k in links) + rounds * max(k.alpha for k in links)
        return slowest + wire / min(k.bandwidth for k in links), wire

    def cheapest(self, src, limit, itemsize):
        """Seconds, and bytes, from `src` to every layout over layouts of at most `limit` elements."""
        best, heap, order = {src: (0.0, 0.0)}, [(0.0, 0, 0.0, src)], 0
        while heap:
            so_far, _, sent, x = heapq.heappop(heap)
            if so_far > best[x][0]:
                continue
            for y in self.named[self.held[x], self.reductions(x)]:
                if so_far < best.get(y, NEVER)[0]:
                    best[y], order = (so_far, sent), order + 1
                    heapq.heappush(heap, (so_far, order, sent, y))
            for op, group, size, y in self.edges[x]:
                time, wire = self.price(op, group, size, itemsize)
                total = so_far + time
                if total < best.get(y, NEVER)[0] and self.sizes[y] <= limit:
                    best[y], order = (total, sent + wire), order + 1
                    heapq.heappush(heap, (total, order, sent + wire, y))
        return best

    def check(self, itemsize=4, every=1):
        """Compare all pairs (or every so many) with `plan`; the number compared."""
        best = lru_cache(None)(self.cheapest)
        count = 0
        for index, (src, dst) in enumerate(product(self.layouts, repeat=2)):
            if index % every:
                continue
            limit = max(self.size(self.held[src]), self.size(self.held[dst]))
            small, any_size = best(src, limit, itemsize).get(dst, NEVER), best(src, inf, itemsize)[dst]
            found = plan(src, dst, self.lengths, self.network, itemsize)
            within = all(self.size(self.held[s.dst]) <= limit for s in found.steps)
            least = small[0] if within else any_size[0]
            assert found.seconds == pytest.approx(least, rel=1e-9, abs=1e-15), f"{found}\n{src} -> {dst}: {least}"
            # What bounds memory may not send more than gathering the whole tensor does.
            held, kept = self.size(self.held[src]), dict(dst.partial)
            opened = [self.network.sizes[a] for a, op in src.partial if kept.get(a) != op]
            whole = itemsize * (prod(self.lengths) - held + sum(2 * (n - 1) / n * held for n in opened))
            if within:
                assert small[1] <= whole * (1 + 1e-9) or small[0] == pytest.approx(any_size[0]), f"{found}"
            else:
                assert small[1] > whole, f"{found}"
            assert sum(s.seconds for s in found.steps) == pytest.approx(found.seconds)
            count += 1
        return count


NEVER = (inf, inf)
MESHES = [(1,), (2,), (1, 2), (2, 1), (2, 2), (1, 1, 1), (1, 2, 2), (2, 2, 2)]
AT_NIGHT = [pytest.param(sizes, marks=pytest.mark.nightly, id=str(sizes)) for sizes in ((2, 1, 2), (2, 2, 1))]


@pytest.mark.parametrize("scale", [1, 1024], ids=["small", "large"])
@pytest.mark.parametrize("sizes", [*MESHES, *AT_NIGHT], ids=str)
def test_no_path_is_cheaper(sizes, scale):
    """All pairs of layouts of a matrix, where starting a collective costs most and where its bytes do."""
    for network in (Network.of(sizes), everything_merged(sizes)):
        every = 61 if len(sizes) == 3 else 1
        exhaustive = Exhaustive((8, 8), network)
        assert exhaustive.check(itemsize=4 * scale**2, every=every) == ceil(len(exhaustive.layouts) ** 2 / every)


@pytest.mark.parametrize("ndim", [0, 1, 3])
def test_no_path_is_cheaper_for_other_ranks_of_tensors(ndim):
    exhaustive = Exhaustive((8,) * ndim, everything_merged((2, 2)))
    assert exhaustive.check(itemsize=1 << 16) == len(exhaustive.layouts) ** 2
    assert Exhaustive((8,) * ndim, everything_merged((2, 2, 2))).check(itemsize=1 << 16, every=61) > 0


def test_no_path_is_cheaper_where_lengths_do_not_divide():
    """Merged groups included: 13 and 9 are cut by two axes otherwise than by one of four ranks."""
    assert Exhaustive((13, 9), everything_merged((2, 2))).check(itemsize=1 << 16) == 18**2
    assert Exhaustive((13, 12), everything_merged((2, 2))).check(itemsize=1 << 16) == 18**2
    assert Exhaustive((13, 9), Network.of((2, 2, 2))).check(itemsize=1 << 16, every=11) > 0


def test_no_path_is_cheaper_with_other_reductions():
    ops = ("sum", "avg", "max", "product")
    assert Exhaustive((8,), everything_merged((2, 2)), ops).check(itemsize=1 << 16) == 37**2


def test_no_path_is_cheaper_over_unequal_axes_and_links():
    network = everything_merged((2, 4), (INTER, INTRA))
    assert Exhaustive((8, 8), network).check(itemsize=1 << 16) == 18**2
    slow = Link(alpha=1e-3, bandwidth=1e6)
    assert Exhaustive((8, 8), everything_merged((2, 2, 2), (INTRA, slow, INTER))).check(1 << 12, every=17) > 0


def text(src, dst, shape=(1024, 1024), sizes=(2, 2), merged=True, **options):
    network = everything_merged(sizes) if merged else Network.of(sizes)
    return str(plan(Layout.parse(src, len(shape)), Layout.parse(dst, len(shape)), shape, network, **options))


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("RR", "RR", "RR -> RR: nothing to do"),
        ("S(0)R", "RR", "S(0)R -> RR: all_gather over axis 0, 2.1 MB"),
        ("PR", "S(1)R", "PR -> S(1)R: reduce_scatter over axis 0, 2.1 MB"),
        ("RR", "RS(1)", "RR -> RS(1): shard over axis 1, local"),
        ("RR", "PR", "RR -> PR: partial over axis 0, local"),
        ("S(0)R", "S(1)R", "S(0)R -> S(1)R: all_to_all over axis 0, 1.0 MB"),
        ("PP", "RR", "PP -> RR: all_reduce over axes 0, 1, 6.3 MB"),
        ("S(0)S(0)", "RR", "S(0)S(0) -> RR: all_gather over axes 0, 1, 3.1 MB"),
        ("PP", "S(0)S(0)", "PP -> S(0)S(0): reduce_scatter over axes 0, 1, 3.1 MB"),
        ("S(0)S(0)", "S(1)S(1)", "S(0)S(0) -> S(1)S(1): all_to_all over axes 0, 1, 786.4 kB"),
        ("S(0)S(0)", "S(0)#1S(0)#0", "S(0)S(0) -> S(0)#1S(0)#0: collective_permute over axes 0, 1, 1.0 MB"),
        ("S(0)S(1)", "S(1)S(0)", "S(0)S(1) -> S(1)S(0): collective_permute over axes 0, 1, 1.0 MB"),
    ],
)
def test_text(src, dst, expected):
    assert text(src, dst) == expected


def test_an_unprepared_mesh_merges_nothing():
    assert text("PP", "S(0)S(0)", merged=False) == (
        "PP -> S(0)P: reduce_scatter over axis 0, 2.1 MB\nS(0)P -> S(0)S(0): reduce_scatter over axis 1, 1.0 MB"
    )


def test_what_does_not_divide_is_not_merged_but_sums_are():
    assert "axes" not in text("S(0)S(0)", "RR", (1023, 8))
    assert "axes" not in text("S(0)S(0)", "S(0)#1S(0)#0", (1023, 7))
    assert text("PP", "RR", (3, 3)) == "PP -> RR: all_reduce over axes 0, 1, 54 B"


def test_a_later_reduction_of_another_kind_comes_first():
    """A sum over axis 0 of maxima over axis 1 is no maximum of sums."""
    first = plan(Layout.parse("PP(max)", 0), Layout.parse("RR", 0), (), everything_merged((2, 2))).steps[0]
    assert (first.op, first.axes, first.reduce_op) == ("all_reduce", (1,), "max")
    first = plan(Layout.parse("P(max)P", 0), Layout.parse("RR", 0), (), everything_merged((2, 2))).steps[0]
    assert (first.op, first.axes, first.reduce_op) == ("all_reduce", (1,), "sum")


def test_slow_links_carry_less():
    """Between hosts only what was reduced within one."""
    network = everything_merged((2, 4), (INTER, INTRA))
    made = plan(Layout.parse("PP", 1), Layout.parse("RR", 1), (1 << 24,), network)
    assert [(s.op, s.axes) for s in made.steps] == [
        ("reduce_scatter", (1,)),
        ("all_reduce", (0,)),
        ("all_gather", (1,)),
    ]


SEARCHED = {
    "even": ((16, 16, 16), everything_merged((2, 2, 2)), 211),
    "uneven": ((13, 9), everything_merged((2, 2)), 1),
    "other sizes of axes": ((24, 24), everything_merged((2, 3)), 1),
    "single axes": ((16, 16), Network.of((2, 4)), 1),
    "unequal links": ((16, 16), everything_merged((2, 2, 2), (INTER, INTRA, Link(alpha=1e-3, bandwidth=1e6))), 17),
    "other reductions": ((8,), everything_merged((2, 2)), 1),
    "an axis of one rank": ((8, 8), everything_merged((2, 1, 2)), 5),
}
"""Lengths, network, and of how many pairs of layouts one is planned."""


LOOKED_AT = {
    "even": (15707, 176042, 874),
    "uneven": (5255, 20647, 1398),
    "other sizes of axes": (4532, 20446, 1346),
    "single axes": (4868, 18360, 1465),
    "unequal links": (51241, 425170, 3458),
    "other reductions": (10600, 36835, 3511),
    "an axis of one rank": (21794, 101976, 6590),
}
"""States opened, steps seen there, steps of the plans."""


@pytest.mark.parametrize("case", SEARCHED)
def test_how_much_a_search_looks_at(case, monkeypatch):
    """How many states it opens, and how many steps it sees there: what prunes and what bounds the search has no other
    effect. A change that is meant is written into the table; it should make the numbers smaller."""
    lengths, network, every = SEARCHED[case]
    looked = [0, 0]
    listed = Space.edges

    def counted(self, at):
        found = listed(self, at)
        looked[0] += 1
        looked[1] += len(found)
        return found

    monkeypatch.setattr(Space, "edges", counted)
    planner.forget()
    transitions.forget()
    every_layout = layouts(
        len(network.sizes), len(lengths), ("sum", "max", "product") if "reductions" in case else ("sum",)
    )
    steps = 0
    for prefer in ("time", "memory"):
        for src, dst in list(product(every_layout, repeat=2))[::every]:
            steps += len(plan(src, dst, lengths, network, 1 << 12, prefer).steps)
    assert (*looked, steps) == LOOKED_AT[case]


def test_plans_are_cached():
    a, b = Layout.parse("S(0)", 1), Layout.parse("R", 1)
    small, large = plan(a, b, (1024,), (4,)), plan(a, b, (2048,), (4,))
    assert small.bytes == 0.75 * 4096
    assert large.bytes == 2 * small.bytes
    assert large.seconds > small.seconds
    assert plan(a, b, (1024,), (4,)) is small


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("merged", [True, False], ids=["merged", "single"])
def test_memory(sizes, merged):
    """Preferring memory, no path holds less; and a plan says what it holds."""
    network = everything_merged(sizes) if merged else Network.of(sizes)
    exhaustive = Exhaustive((8, 8), network)
    sized = {x: exhaustive.size(held) for x, held in exhaustive.held.items()}

    @lru_cache(None)
    def least(src):
        best, heap, order = {src: 0}, [(0, 0, src)], 0
        while heap:
            peak, _, x = heapq.heappop(heap)
            for *_, y in exhaustive.edges[x]:
                most = max(peak, sized[x] + sized[y])
                if most < best.get(y, inf):
                    best[y], order = most, order + 1
                    heapq.heappush(heap, (most, order, y))
        return best

    for src, dst in list(product(exhaustive.layouts, repeat=2))[:: 1 if len(sizes) == 2 else 43]:
        larger = max(sized[src], sized[dst])
        found = plan(src, dst, (8, 8), network, 4)
        assert found.peak == max([4 * larger, *[4 * (sized[s.src] + sized[s.dst]) for s in found.steps]])
        frugal = plan(src, dst, (8, 8), network, 4, "memory")
        assert frugal.peak == 4 * max(larger, least(src)[dst]), f"{frugal}"
        assert frugal.peak <= found.peak


def test_memory_and_time_may_differ():
    args = Layout.parse("PR", 2), Layout.parse("RR", 2), (64, 64), everything_merged((2, 2))
    quick, frugal = plan(*args), plan(*args, 4, "memory")
    assert frugal.seconds >= quick.seconds
    assert [s.op for s in quick.steps] == ["all_reduce"]
    assert quick.peak == 2 * 64 * 64 * 4


@pytest.mark.parametrize(("shape", "sizes"), [((24, 40), (2, 4)), ((13, 9), (2, 2)), ((8,), (2, 2, 2))], ids=str)
def test_symbolic_cost_agrees_with_numbers(shape, sizes):
    links = tuple(Link(alpha=1e-6 * (a + 1), bandwidth=1e9 * (a + 1)) for a in range(len(sizes)))
    network = everything_merged(sizes, links)
    values = {f"s{d}": n for d, n in enumerate(shape)} | {f"n{a}": n for a, n in enumerate(sizes)}
    for src, dst in list(product(layouts(len(sizes), len(shape)), repeat=2))[::31]:
        made = plan(src, dst, shape, network, 2)
        assert (made.cost().bytes, made.cost().seconds) == (made.bytes, made.seconds)
        cost = made.cost(symbolic=True)
        known = {x: values[x.name] for x in cost.bytes.free_symbols | cost.seconds.free_symbols}
        assert float(cost.bytes.subs(known)) == pytest.approx(made.bytes)
        assert float(cost.seconds.subs(known)) == pytest.approx(made.seconds)


def test_symbolic_cost_reads_well():
    made = plan(Layout.parse("S(0)P", 2), Layout.parse("RR", 2), (8, 8), (2, 2))
    s0, s1, n0, n1 = [sympy.Symbol(x, positive=True, integer=True) for x in ("s0", "s1", "n0", "n1")]
    expected = 4 * s0 * s1 * (2 * (n1 - 1) / (n0 * n1) + (n0 - 1) / n0)
    assert sympy.simplify(made.cost(symbolic=True).bytes - expected) == 0
    assert made.cost(symbolic=True).seconds.free_symbols == {s0, s1, n0, n1}


def test_costs_by_hand():
    link = Link(alpha=1.0, bandwidth=100.0, memory=1000.0, launch=0.5, start=2.0)
    assert seconds("all_gather", 800, 4, link) == 2 + 2 + 6
    assert seconds("reduce_scatter", 800, 8, link) == 2 + 3 + 7
    assert seconds("all_reduce", 800, 4, link) == 2 + 4 + 12
    assert seconds("all_to_all", 800, 4, link) == 2 + 2 + 6
    assert seconds("collective_permute", 800, 4, link) == 2 + 1 + 8
    assert seconds("shard", 800, 4, link) == 0.5 + 0.8
    assert seconds("all_reduce", 800, 1, link) == 0
    assert wire_bytes("all_reduce", 800, 4) == 1200
    with pytest.raises(ValueError, match="has 2 axes but 1 links were given"):
        Network.of((2, 2), (link,))
