"""Files that are written at once: whole or not there; links and pipes stay."""

import os
import threading

import pytest

from dtensor.program.files import write_whole


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_whole(path, "first")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "second")
    assert path.read_text() == "first\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_link_to_a_file_stays_one(tmp_path):
    """As /dev/stdout is, which is not to be replaced."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    write_whole(link, "after")
    assert link.is_symlink()
    assert file.read_text() == "after\n"


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == ["through\n"]
    assert pipe.is_fifo()
