"""What MkDocs builds of the repository beside the pages: files at its top, the passes, and the command line.

A page writes one of these comments where the text is to stand:

    <!-- file: ARCHITECTURE.md -->    the file, with its links
    <!-- passes -->                   a section for each pass of the pipeline, from its docstring
    <!-- commands -->                 the help of each command
    <!-- variables -->                the environment variables
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
FILES = re.compile(r"<!-- file: (\S+) -->")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = {
    "ARCHITECTURE.md": "how/architecture.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "how/contributing.md",
}
"""A file at the top of the repository -> the page that it is."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with what its comments stand for."""
    here = Path(page.file.src_uri)
    markdown = FILES.sub(lambda found: _file(found[1], here), markdown)
    for mark, made in (("passes", _passes), ("commands", _commands), ("variables", _variables)):
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", "\n\n".join(made()))
    return _links(markdown, here)


def _file(name: str, here: Path) -> str:
    text = (ROOT / name).read_text()
    up = "../" * (len(here.parts) - 1)

    def link(found: re.Match[str]) -> str:
        target = found[3]
        if "://" in target or target.startswith("#"):
            return found[0]
        path, _, anchor = target.partition("#")
        path = path.removeprefix("docs/") if path.startswith("docs/") else f"{'../' * len(here.parts[:-1])}../{path}"
        inside = not path.startswith("..")
        return f"{found[1]}[{found[2]}]({up if inside else ''}{path}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)


def _links(markdown: str, here: Path) -> str:
    """Links that leave the pages: to a file that is a page, to that; to others, only their text."""
    folder = (ROOT / "docs" / here).parent

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[3].partition("#")
        if "://" in target or not target or (folder / target).resolve().is_relative_to(ROOT / "docs"):
            return found[0]
        name = str((folder / target).resolve().relative_to(ROOT))
        if name not in PAGES:
            return f"`{name}`" if found[2] in (name, target) else f"{found[2]} (`{name}`)"
        up = "../" * (len(here.parts) - 1)
        return f"[{found[2]}]({up}{PAGES[name]}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, markdown)


def _passes() -> Iterator[str]:
    from dtensor.passes import PIPELINE, SplitBatch

    for made in (*PIPELINE, SplitBatch(2)):
        where = inspect.getfile(type(made)).partition("passes/")[2]
        yield f"## {made.name}\n\n*{made.exactness}*, `passes/{where}`"
        yield _fenced(inspect.getdoc(type(made)) or "")


def _fenced(text: str) -> str:
    """Indented blocks as fenced ones."""
    return re.sub(r"(?m)((?:^    .*\n?)+)", lambda found: f"```text\n{inspect.cleandoc(found[1])}\n```\n", text + "\n")


def _commands() -> Iterator[str]:
    from dtensor.tools.cli import main

    def of(command: click.Command, name: str, context: click.Context | None) -> Iterator[str]:
        here = click.Context(command, info_name=name, parent=context, max_content_width=100)
        yield f"## {here.command_path}\n\n```text\n{command.get_help(here)}\n```"
        if isinstance(command, click.Group):
            for inner in command.list_commands(here):
                found = command.get_command(here, inner)
                if found is not None:
                    yield from of(found, inner, here)

    yield from of(main, "dtensor", None)


def _variables() -> Iterator[str]:
    from dtensor.mesh import environment

    yield _fenced(environment.__doc__ or "")
