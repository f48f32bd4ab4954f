"""A plugin of pytest that writes how long each test took into the file that MUTATION_TIMES names."""

import json
import os
from collections import defaultdict
from typing import Any

_times: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: Any) -> None:
    _times[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    with open(os.environ["MUTATION_TIMES"], "w") as file:
        json.dump(_times, file)
