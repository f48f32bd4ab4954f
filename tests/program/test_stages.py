"""What takes long is told every few seconds, and what does not is not."""

import io
import logging
import os
import re
import threading
import time
import types

import pytest

from dtensor.program import stages
from dtensor.program.stages import Stage


def until(holds):
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


@pytest.fixture
def fast(monkeypatch):
    """Lines every fifth of a second."""
    monkeypatch.setattr(stages, "EVERY", 0.2)
    monkeypatch.setattr(stages, "TICK", 0.02)
    monkeypatch.setattr(stages, "LIVE", 0.05)
    with Stage("wakes the thread"):
        pass
    until(lambda: not stages._teller.awake.is_set())


def test_a_stage_that_lasts_is_told_with_those_inside(fast, caplog):
    with Stage("loading"), Stage("nothing") as inner:
        time.sleep(0.6)
        inner.what = "part 3 of 4"
        until(lambda: any("part 3" in m for m in caplog.messages))
    first, *_, last = caplog.messages
    assert re.fullmatch(r"loading: nothing", first)
    assert re.fullmatch(r"loading: done after \d+ s", last)
    assert re.search(r"^loading: part 3 of 4 \(\d s\)$", "\n".join(caplog.messages), re.MULTILINE)


def test_many_short_ones_are_told_like_a_long_one(fast, caplog):
    """A program that compiles a hundred small frames would be silent for minutes."""
    deadline = time.monotonic() + 20
    while not caplog.messages and time.monotonic() < deadline:
        with Stage("compiling f"):
            time.sleep(0.03)
    assert caplog.messages[0] == "compiling f"


def test_a_short_one_is_not_told(caplog):
    with Stage("loading"):
        pass
    assert caplog.messages == []


def test_what_ends_by_an_error_says_so(fast, caplog):
    try:
        with Stage("loading"):
            until(lambda: caplog.messages)
            raise KeyError
    except KeyError:
        pass
    assert re.fullmatch(r"loading: ended by an error after \d+ s", caplog.messages[-1])


def test_stages_inside_of_others_only(fast, caplog):
    with Stage("part 1", inside=True):
        assert stages.now(threading.get_ident()) == ""
    with Stage("saving"), Stage("part 2", inside=True):
        assert stages.now(threading.get_ident()) == "saving: part 2"
    assert stages.now(threading.get_ident()) == ""


def test_each_call_of_a_function_is_a_stage():
    @Stage("searching")
    def search(x):
        return x, stages.now(threading.get_ident())

    assert search(3) == (3, "searching")
    assert search.__name__ == "search"


def test_other_threads_have_their_own(fast, caplog):
    def work():
        with Stage("copying"):
            until(lambda: "copying" in caplog.messages)

    thread = threading.Thread(target=work)
    with Stage("loading"):
        thread.start()
        thread.join()
    assert "loading" in caplog.messages
    assert stages._stacks == {}


def test_whom_the_program_waits_for(fast, caplog):
    try:
        with Stage("demo"):
            stages.waits("waits in all_reduce at a.py:3", "rank 0 computes at b.py:4", 7.0)
            until(lambda: caplog.messages)
    finally:
        stages.waits("")
    said = r"demo: waits in all_reduce at a\.py:3 \([78] s\): rank 0 computes at b\.py:4"
    assert re.fullmatch(said, caplog.messages[0])


def test_what_is_inside_of_a_stage_may_be_asked():
    began = time.monotonic() - 5
    with Stage("compiling f", lambda: [("joint graph", began), ("pass bucket", time.monotonic())]):
        assert stages.now(threading.get_ident()) == "compiling f: joint graph (5 s): pass bucket"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_on_a_terminal_vanishes(fast, monkeypatch):
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    terminal = Terminal()
    monkeypatch.setattr(stages, "sys", types.SimpleNamespace(stderr=terminal))
    with Stage("loading"):
        until(lambda: "loading" in terminal.getvalue())
    until(lambda: terminal.getvalue().endswith(stages.CLEAR))
    assert set(terminal.getvalue().split(stages.CLEAR)) == {"", "loading"}


@pytest.mark.parametrize(
    ("setting", "rank", "terminal", "live"),
    [("", 0, True, True), ("", 1, True, False), ("", 0, False, False), ("1", 0, True, False), ("0", 0, True, False)],
)
def test_where_a_line_is_rewritten(setting, rank, terminal, live, monkeypatch):
    monkeypatch.setenv(stages.SWITCH, setting)
    monkeypatch.setattr(stages, "rank", lambda: rank)
    monkeypatch.setattr(stages, "sys", types.SimpleNamespace(stderr=Terminal() if terminal else io.StringIO()))
    assert stages.is_live() is live


def test_the_variable_is_a_switch(monkeypatch):
    monkeypatch.setenv(stages.SWITCH, "yes")
    with pytest.raises(ValueError, match="DTENSOR_PROGRESS is 'yes'; write 0 or 1, or leave it unset"), Stage("x"):
        pass


@pytest.mark.parametrize(("variables", "who"), [({}, "dtensor"), ({"RANK": "3"}, "dtensor, rank 3")])
def test_lines_on_standard_error(variables, who, fast, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    said = io.StringIO()
    monkeypatch.setattr(stages, "sys", types.SimpleNamespace(stderr=said))
    with Stage("loading"):
        until(lambda: said.getvalue().count("\n") >= 2)
    for line in said.getvalue().splitlines():
        assert re.fullmatch(rf"\d\d:\d\d:\d\d {who}: loading.*", line)


def test_lines_are_forbidden(fast, caplog, monkeypatch):
    monkeypatch.setenv(stages.SWITCH, "0")
    with Stage("loading"):
        stages.waits("waits in a barrier", "rank 0 computes", 9.0)
        stages.say("f is compiled again")
        time.sleep(0.5)
    assert caplog.messages == []
    assert stages._waits is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_is_forked_off_has_no_stages():
    with Stage("loading"):
        child = os.fork()
        if child == 0:
            os._exit(stages.now(threading.get_ident()) != "" or stages._teller is not None)
        assert os.waitpid(child, 0)[1] == 0
