"""What a notebook defines, sent to a process that cannot import it; here both are this process."""

import contextlib
import dataclasses
import enum
import functools
import pickle
import sys
import types

import pytest
import torch

from dtensor.testing.simulation import by_value

CELL = '''
import dataclasses, enum, functools
import torch
from torch import nn

SCALE = 3

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int = 2
    tags: list = dataclasses.field(default_factory=list, metadata={"a": 1})

    @property
    def sum(self):
        return self.x + self.y

    @staticmethod
    def zero():
        return Point(0, 0)

    @classmethod
    def one(cls):
        return cls(1, 1)

    @functools.cached_property
    def twice(self):
        return Point(2 * self.x, 2 * self.y)

class Slots:
    __slots__ = ("a",)
    def __init__(self):
        self.a = Color.RED

class Net(nn.Module):
    """A net."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return scaled(self.layer(x))

def scaled(x, by=None, *, more=0):
    return x * (SCALE if by is None else by) + more

def fact(n):
    return 1 if n < 2 else n * fact(n - 1)

def outer(k):
    def inner(x):
        return 0 if x == 0 else k + inner(x - 1)
    return inner

def missing():
    return not_here

def with_lock():
    return lock, through()

def through():
    return with_lock()
'''


@pytest.fixture
def cell():
    """A module that cannot be imported, as the `__main__` of a notebook, from which `sent` sends."""
    module = types.ModuleType("cell_of_a_notebook")
    sys.modules[module.__name__] = module
    by_value.remember_lines("/nowhere/cell.py", CELL.splitlines(keepends=True))
    exec(compile(CELL, "/nowhere/cell.py", "exec"), vars(module))
    yield module
    sys.modules.pop(module.__name__)


def sent(value):
    """`value` as another process has it: what this one knows of the cell is gone."""
    data = by_value.dumps(value)
    with elsewhere():
        return by_value.loads(data)


@contextlib.contextmanager
def elsewhere():
    here = sys.modules.pop("cell_of_a_notebook")
    made = dict(vars(by_value)["_made"])
    try:
        yield
    finally:
        vars(by_value)["_made"].clear()
        vars(by_value)["_made"].update(made)
        sys.modules["cell_of_a_notebook"] = here


def test_functions(cell):
    assert sent(cell.scaled)(2) == 6
    assert sent(cell.scaled)(2, 5, more=1) == 11
    assert sent(cell.fact)(5) == 120
    assert sent(cell.outer(4))(3) == 12
    scaled = cell.scaled
    assert sent(lambda x: scaled(x) + 1)(1) == 4
    assert sent(functools.partial(cell.scaled, by=7))(2) == 14
    assert sent(cell.scaled) is not cell.scaled
    assert sent(torch.relu) is torch.relu


def test_classes(cell):
    net = sent(cell.Net)
    assert net is not cell.Net
    assert (net.__name__, net.__module__, net.__doc__) == ("Net", "cell_of_a_notebook", "A net.")
    torch.manual_seed(0)
    expected = cell.Net()(torch.ones(1, 2))
    torch.manual_seed(0)
    assert net()(torch.ones(1, 2)).equal(expected)
    assert sent(cell.Net())(torch.ones(1, 2)).shape == (1, 2)


def test_dataclasses_and_descriptors(cell):
    point, cls = sent((cell.Point(3), cell.Point))
    assert isinstance(point, cls)
    assert point == cls(3)
    assert cls(1) < point
    assert [field.name for field in dataclasses.fields(cls)] == ["x", "y", "tags"]
    assert (point.sum, cls.zero().x, cls.one().y, point.twice.x) == (5, 0, 1, 6)
    assert sent(cell.Slots)().a.name == "RED"
    assert not hasattr(sent(cell.Slots)(), "__dict__")
    red = sent(cell.Color.RED)
    assert isinstance(red, enum.Enum)
    assert red.value == 1


def test_sent_again_it_is_the_same_with_the_globals_of_now(cell):
    first, cell.SCALE, second = by_value.dumps((cell.scaled, cell.Point)), 5, None
    second = by_value.dumps((cell.scaled, cell.Point))
    with elsewhere():
        scaled, point = by_value.loads(first)
        assert scaled(1) == 3
        assert by_value.loads(second) == (scaled, point)
        assert scaled(1) == 5


def test_results_are_found_by_name(cell):
    """An instance of a class that was sent is pickled by its name, which leads to the class here."""
    data = by_value.dumps(cell.Point(3))
    with elsewhere():
        answer = pickle.dumps(by_value.loads(data))
    assert pickle.loads(answer) == cell.Point(3)


def test_what_cannot_be_sent_is_named(cell):
    cell.lock = (types.SimpleNamespace(), sys._getframe())
    with pytest.raises(TypeError, match=r"the global 'lock' cannot be sent .*frame.*; make it on the ranks"):
        by_value.dumps((cell.through, (), {}))
    with pytest.raises(NameError, match="not_here"):
        sent(cell.missing)()


def test_lines_travel_along(cell, monkeypatch):
    data = by_value.dumps(cell.missing)
    monkeypatch.delitem(by_value.linecache.cache, "/nowhere/cell.py")
    assert by_value.linecache.getline("/nowhere/cell.py", 2) == ""
    with elsewhere():
        by_value.loads(data)
    assert by_value.linecache.getline("/nowhere/cell.py", 2) == "import dataclasses, enum, functools\n"
