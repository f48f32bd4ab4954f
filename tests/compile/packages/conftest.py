import os
import shutil

import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """A folder of what g++ has made for the tests, which is found by its source: each kernel takes a second."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def own_caches(tmp_path, kernels, monkeypatch):
    """Inductor's caches in a folder without graphs, so that each is compiled; kernels of earlier tests are there."""
    folder = tmp_path / "inductor"
    shutil.copytree(kernels, folder, copy_function=os.link)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    yield tmp_path
    for made in folder.glob("??/*"):
        if made.suffix in (".cpp", ".so", ".h") and not (kept := kernels / made.parent.name / made.name).exists():
            kept.parent.mkdir(exist_ok=True)
            os.link(made, kept)


@pytest.fixture(scope="session")
def safe_folder(tmp_path_factory):
    """A folder that only its owner can write to."""
    folder = tmp_path_factory.mktemp("packages")
    os.chmod(folder, 0o700)
    return folder
