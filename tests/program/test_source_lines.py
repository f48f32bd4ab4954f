"""Whose code a file is."""

import logging
import os

import numpy
import pytest
import torch

import dtensor
from dtensor.program.source_lines import is_users
from dtensor.testing import models

FILES = {
    "train.py": True,
    __file__: True,
    numpy.__file__: True,
    os.path.join(os.path.dirname(os.__file__), "site-packages", "package.py"): True,
    models.__file__: True,
    logging.__file__: False,
    torch.__file__: False,
    dtensor.__file__: False,
    "/tmp/torchinductor_me/gl/cglod53dptge5hepizgukdc5mkbkfa7zi6yjmb2zhpxewyi5quwy.py": False,
    "<string>": False,
}


@pytest.mark.parametrize("file", FILES)
def test_files(file):
    assert is_users(file) == FILES[file]
