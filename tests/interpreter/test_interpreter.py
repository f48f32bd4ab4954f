"""What `python()` gives runs programs as Python does, in which this library reads its environment anew."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.interpreter import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is Python itself")

PROGRAM = """
import os, sys
print(__name__, sys.argv, os.getcwd(), "torch" in sys.modules, "dtensor" in sys.modules)
print(sys.stdin.read(), file=sys.stderr)
from dtensor.program import environment
raise SystemExit(7)
"""


def test_a_program_gets_what_python_would_give_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments, told in ((["program.py", "x"],) * 2, (["-W", "error", "-c", PROGRAM, "x"], ["-c", "x"])):
        done = subprocess.run(
            [python(), *arguments], cwd=tmp_path, input="given", capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, done.stderr) == (7, "given\n")
        assert done.stdout == f"__main__ {told} {tmp_path} True False\n"


def test_another_environment_of_torch_is_read_by_a_new_interpreter(tmp_path):
    code = "import sys; print('torch' in sys.modules)"
    for variables, preloaded in (({"DTENSOR_X": "1", "TORCHELASTIC_RUN_ID": "1"}, True), ({"TORCH_LOGS": ""}, False)):
        said = subprocess.check_output([python(), "-c", code], env={**os.environ, **variables}, text=True, timeout=100)
        assert said == f"{preloaded}\n"


def test_signals_reach_the_program_and_its_end_is_told(tmp_path):
    waits = "import time; open('{}', 'w').close(); time.sleep(100)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        file = tmp_path / str(int(number))
        with subprocess.Popen([python(), "-c", waits.format(file)]) as program:
            while not file.exists():
                time.sleep(0.01)
            program.send_signal(number)
            assert program.wait(50) == -number
    ended = [python(), "-c", "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 9)"]
    with subprocess.Popen(ended, stdout=subprocess.PIPE, text=True) as program:
        out, _ = program.communicate(timeout=50)
    assert program.returncode == -signal.SIGKILL
    assert int(out) != program.pid


def test_who_is_killed_leaves_no_program_behind(tmp_path):
    with subprocess.Popen(
        [python(), "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"],
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.kill()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "the program still runs"
        time.sleep(0.01)
