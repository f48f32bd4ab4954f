"""Run a script under torchrun in which one rank kills itself in the middle of a save, the first time.

    torchrun … dying.py RANK STEP script.py arguments…

Half of what the rank has to write of the checkpoint of STEP is on disk then.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from dtensor.state.files import Writer


def die_while_saving(step: int) -> None:
    """Have this process end as by a crash of its machine, when it writes its part of that checkpoint."""
    write = Writer.write_data

    def torn(self, *args, **kwargs):
        written = write(self, *args, **kwargs)
        if self.folder.name.startswith(f".step-{step:08d}."):
            file = self.folder / self.file
            os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    Writer.write_data = torn


if __name__ == "__main__":
    rank, step, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if os.environ["RANK"] == str(rank) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_while_saving(step)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
