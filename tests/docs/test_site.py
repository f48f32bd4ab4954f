"""The manual builds: without a warning, and without a network."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

OFFLINE = """
import socket


def refused(*args, **kwargs):
    raise OSError("the manual is built without a network")


socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refused

from mkdocs.__main__ import cli

cli()
"""
"""mkdocs in a process that cannot reach others."""

REMOTE = re.compile(r"""<(?:script|link|img)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//""", flags=re.IGNORECASE)
"""What a browser would load from elsewhere."""


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "mkdocstrings"))),
    reason="mkdocs-material or mkdocstrings is not installed; write: pip install 'dtensor-compile[docs]'",
)
def test_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-c", OFFLINE, "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    assert [str(page) for page in pages if "doc-symbol-module" in page.read_text()] == []  # names are functions
    assert [str(page) for page in pages if REMOTE.search(page.read_text())] == []
