import os

import pytest


@pytest.fixture
def own_caches(tmp_path, monkeypatch):
    """Inductor's caches in a folder that is empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path


@pytest.fixture(scope="session")
def safe_folder(tmp_path_factory):
    """A folder that only its owner can write to."""
    folder = tmp_path_factory.mktemp("packages")
    os.chmod(folder, 0o700)
    return folder
