"""Plans against an exhaustive search that knows nothing of them: every layout, every step, every pair."""

import heapq
from collections import defaultdict
from functools import lru_cache
from itertools import combinations, permutations, product
from math import ceil, inf, log2, prod

import pytest

from dtensor.cost import INTER, INTRA, Link, Network
from dtensor.layout import Layout
from dtensor.plan import plan


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
        """Seconds, from the formula written out once more."""
        n, links = self.network.size(group), [self.network.links[a] for a in group]
        wire = {"all_reduce": 2 * (n - 1) / n, "collective_permute": 1}.get(op, (n - 1) / n) * size * itemsize
        rounds = {"all_reduce": 2 * ceil(log2(n)), "all_to_all": n - 1, "collective_permute": 1}.get(op, ceil(log2(n)))
        if op in ("shard", "partial"):
            return max(k.launch for k in links) + size * itemsize / min(k.memory for k in links)
        slowest = max(k.start for k in links) + rounds * max(k.alpha for k in links)
        return slowest + wire / min(k.bandwidth for k in links)

    def cheapest(self, src, limit, itemsize):
        """Seconds from `src` to every layout over layouts of at most `limit` elements."""
        best, heap, order = {src: 0.0}, [(0.0, 0, src)], 0
        while heap:
            so_far, _, x = heapq.heappop(heap)
            if so_far > best[x]:
                continue
            for y in self.named[self.held[x], self.reductions(x)]:
                if so_far < best.get(y, inf):
                    best[y], order = so_far, order + 1
                    heapq.heappush(heap, (so_far, order, y))
            for op, group, size, y in self.edges[x]:
                total = so_far + self.price(op, group, size, itemsize)
                if total < best.get(y, inf) and self.size(self.held[y]) <= limit:
                    best[y], order = total, order + 1
                    heapq.heappush(heap, (total, order, y))
        return best

    def check(self, itemsize=4, every=1):
        """Compare all pairs (or every so many) with `plan`; the number compared."""
        best = lru_cache(None)(self.cheapest)
        count = 0
        for index, (src, dst) in enumerate(product(self.layouts, repeat=2)):
            if index % every:
                continue
            limit = max(self.size(self.held[src]), self.size(self.held[dst]))
            least = best(src, limit, itemsize).get(dst, inf)
            if least == inf:
                least = best(src, inf, itemsize)[dst]
            found = plan(src, dst, self.lengths, self.network, itemsize)
            assert found.seconds == pytest.approx(least, rel=1e-9, abs=1e-15), f"{found}\n{src} -> {dst}: {least}"
            assert sum(s.seconds for s in found.steps) == pytest.approx(found.seconds)
            count += 1
        return count


MESHES = [(1,), (2,), (1, 2), (2, 1), (2, 2), (1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize("scale", [1, 1024], ids=["small", "large"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_no_path_is_cheaper(sizes, scale):
    """All pairs of layouts of a matrix, where starting a collective costs most and where its bytes do."""
    for network in (Network.of(sizes), everything_merged(sizes)):
        every = 5 if len(sizes) == 3 else 1
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
