"""The commands of the guide to packages, on its own script."""

import os
import re

import pytest

from tests.docs.pages import blocks
from tests.docs.test_comparing import run

PAGE = "guides/packages.md"


@pytest.mark.nightly
def test_what_the_guide_shows(tmp_path, monkeypatch):
    (script,) = [text for _, text in blocks(PAGE, "py") if text.startswith("# train.py")]
    (tmp_path / "train.py").write_text(script)
    os.chmod(tmp_path, 0o700)
    make, start = [text.strip() for _, text in blocks(PAGE, "bash")]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    done = run(make, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"1 frames, [\d,]+ bytes, SHA-256 [0-9a-f]{64}", done.stdout.strip().splitlines()[-1])
    losses = set()
    for line, more in ((start, {"DTENSOR_PACKAGE_STRICT": "1"}), (start.split(" ", 1)[1], {})):
        words = line.split()
        for name, value in [*[w.split("=", 1) for w in words if w.startswith("DTENSOR_")], *more.items()]:
            monkeypatch.setenv(name, value)
        done = run(" ".join([w for w in words if not w.startswith("DTENSOR_")]), tmp_path)
        assert done.returncode == 0, done.stderr
        losses.add(tuple(sorted(re.findall(r"rank \d: [\d.]+", done.stdout))))
        monkeypatch.delenv("DTENSOR_PACKAGE", raising=False)
    assert len(losses) == 1
    assert len(losses.pop()) == 2
