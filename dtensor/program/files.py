"""Files that are never seen half-written."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: str) -> None:
    """Write a text file atomically: who reads it, as other ranks that write the same one, sees all of it or none.

    A link stays one, and what is no file, such as a pipe, is written to.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    content = content if content.endswith("\n") else content + "\n"
    if path.exists() and not path.is_file():
        path.write_text(content, encoding="utf-8")
        return
    path = path.resolve()
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


__all__ = ["write_whole"]
