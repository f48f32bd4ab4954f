"""What hypothesis draws: recipes and settings. All of it shrinks to fewer steps, numbers of 0, and no options."""

from hypothesis import strategies as st

from dtensor.passes import PIPELINE

from .building import Recipe
from .operators import GROUPS
from .running import Setting

SIZES = (4, 2, 6, 8, 1, 3, 5, 4, 2, 7, 9, 0)
"""Lengths of dimensions: most of them even; on two ranks some shards are uneven, and some empty."""
MESHES = ((2,), (2,), (2, 2), (3,))
COMPILED_MESHES = ((2,), (2,), (2, 2))
OFTEN = 4
"""Of so many programs one is differentiated twice, and one is checkpointed."""

numbers = st.tuples(*[st.integers(0, 59)] * 8)
steps = st.one_of(*[st.tuples(st.sampled_from(names), numbers) for names in GROUPS.values()])


def seldom(strategy, default=None):
    """`strategy` one time in `OFTEN`, otherwise `default`."""
    return st.integers(0, OFTEN - 1).flatmap(lambda k: strategy if k == OFTEN - 1 else st.just(default))


def recipes(meshes=MESHES, longest: int = 12, twice: bool = True):
    """Recipes; `twice` allows second derivatives."""
    return st.builds(
        Recipe,
        mesh=st.sampled_from(meshes),
        sizes=st.tuples(*[st.sampled_from(SIZES)] * 3),
        steps=st.lists(steps, min_size=1, max_size=longest).map(tuple),
        dtype=seldom(st.just("float32"), "float64"),
        checkpointed=seldom(st.tuples(st.integers(0, 9), st.integers(0, 4))),
        twice=seldom(st.just(True), False) if twice else st.just(False),
    )


def option(strategy):
    """`strategy`, or None, which leaves the option out; that is more likely, and smaller."""
    return st.one_of(st.none(), st.none(), strategy)


def options(inner: str):
    """Options of the backend, as pairs."""
    names = [p.name for p in PIPELINE]
    given = st.fixed_dictionaries(
        {
            "inner": st.just(inner),
            "disable": option(st.lists(st.sampled_from(names), max_size=4, unique=True).map(tuple)),
            "split_batch": option(st.just(2)),
            "memory_budget": option(st.sampled_from((0, 200))),
            "verify": seldom(st.just(True)),
        }
    )
    return given.map(lambda d: tuple((k, v) for k, v in d.items() if v is not None))


def settings_of(recipe: Recipe, kind: str):
    """Settings for a recipe: how programs of this kind are compiled."""
    given = options("inductor" if kind == "inductor" else "aot_eager")
    if kind != "dynamic":
        return st.builds(Setting, st.just(recipe.mesh), st.just(True), st.just(False), given)
    batches = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    dynamic = st.sampled_from((True, None))
    return st.builds(Setting, st.just(recipe.mesh), st.just(True), dynamic, given, st.just(False), batches)


def cases(kind: str):
    """(recipe, setting) for "compiled", "dynamic" and "inductor"."""
    drawn = recipes(COMPILED_MESHES, twice=False)
    return drawn.flatmap(lambda recipe: st.tuples(st.just(recipe), settings_of(recipe, kind)))
