"""Hooks of the manual: what its pages take from elsewhere, so that nothing is written twice.

A page says with a comment what stands in its place:

    <!-- file: CHANGELOG.md -->      a file of the repository
    <!-- commands -->                the help of every command
    <!-- passes: stages -->          the table of the pipeline
    <!-- passes: table -->           the passes in their order
    <!-- passes: pages -->           what each does, from its docstring
    <!-- passes: reference -->       their classes
    <!-- there: package.name,… -->   entries of the reference, of those names that the package has
    <!-- block -->                   a block of Llama, drawn as it is compiled (only where the manual is built)

Links to files of the repository that are no pages lead there if mkdocs.yml names a `repo_url`; they are plain text if
not.
`tests/docs` reads the pages by `expanded`, too.
"""

import functools
import importlib.util
import inspect
import pkgutil
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import click  # noqa: E402

import dtensor.compile  # noqa: E402
import dtensor.passes  # noqa: E402
from dtensor.passes.stages import HALVES  # noqa: E402

PAGES_OF_FILES = {
    "ARCHITECTURE.md": "how/architecture.md",
    "CONTRIBUTING.md": "how/contributing.md",
    "BENCHMARKS.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that are pages of the manual."""

MARK = re.compile(r"^<!-- (file|commands|passes|there)(?:: (\S+))? -->$", flags=re.MULTILINE)
BLOCK = re.compile(r"^<!-- block -->$", flags=re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]`\n]|\n(?!\n)|`[^`\n]*`)*)\]\(([^)\s]+)\)")
SHAPE = re.compile(r"\[([\d, ]*)\]")
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)

EXACT = {
    "bitwise": "It is `bitwise`: every rank computes the same bits as before.",
    "reassociates": "It `reassociates`: a sum may be added up in another order, so that results differ by rounding.",
    "casts": "It `casts`: something may be computed in another precision.",
}
"""Exactness that a pass declares, in words."""


def expanded(page: str) -> str:
    """The Markdown of a page, such as `guides/gpus.md`, with what it takes from elsewhere."""
    return _expanded((DOCS / page).read_text(encoding="utf-8"))


def _expanded(text: str) -> str:
    return MARK.sub(lambda found: SOURCES[found[1]](found[2]), text)


def _file(name: str) -> str:
    folder = posixpath.dirname(f"docs/{PAGES_OF_FILES[name]}")
    return _links((ROOT / name).read_text(encoding="utf-8"), lambda url: posixpath.relpath(url, folder) if url else url)


def _links(text: str, changed: Callable[[str], str]) -> str:
    """`text` with other addresses of its relative links; code is left alone."""

    def link(found: re.Match) -> str:
        url, mark, anchor = found[3].partition("#")
        if not url or ":" in url:
            return found[0]
        return f"{found[1]}[{found[2]}]({changed(url)}{mark}{anchor})"

    return "".join([part if part.startswith("```") else LINK.sub(link, part) for part in FENCE.split(text)])


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its name, such as `dtensor checkpoint verify`."""

    def under(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            for word in sorted(command.commands):
                yield from under(f"{name} {word}", command.commands[word])

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for name, where in scripts.items():
        yield from under(name, pkgutil.resolve_name(where))


def _commands(_: Any) -> str:
    shown = []
    for name, command in commands():
        with click.Context(command, info_name=name, max_content_width=100, terminal_width=100) as context:
            shown.append(f"### {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(shown)


def passes() -> dict[str, list[Any]]:
    """The passes of each stage, in the order in which they run."""
    return {stage.name: list(stage.passes) for stage in dtensor.passes.STAGES}


def stages() -> str:
    """The table of the pipeline, as ARCHITECTURE.md and the manual show it."""
    rows = ["| stage | graphs | passes | why there |", "|---|---|---|---|"]
    for stage in dtensor.passes.STAGES:
        graphs = ", ".join(stage.graphs).replace(", ".join(HALVES), "each half")
        rounds = " (in rounds, until nothing changes)" if stage.fixpoint else ""
        names = ", ".join([f"`{p.name}`" for p in stage.passes])
        rows.append(f"| {stage.name} | {graphs} | {names}{rounds} | {stage.why} |")
    return "\n".join(rows)


def public_name(p: Any) -> str:
    """Where a pass's class is found."""
    return f"dtensor.passes.{type(p).__name__}"


def _table_of_passes() -> str:
    rows = ["| pass | stage | when | exactness | what it does |", "|---|---|---|---|---|"]
    for stage, members in passes().items():
        for p in members:
            does = (inspect.getdoc(type(p)) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            when = p.when or "unless left out"
            rows.append(f"| [`{p.name}`](#{_anchor(p)}) | {stage} | {when} | {p.exactness} | {does} |")
    return "\n".join(rows)


def _anchor(p: Any) -> str:
    return f"pass-{p.name.replace('_', '-')}"


def _pages_of_passes() -> str:
    shown = []
    for stage, members in passes().items():
        shown.append(f"## Stage {stage}\n")
        shown += [_page_of_pass(p) for p in members]
    return "\n".join(shown)


def _page_of_pass(p: Any) -> str:
    """A section on one pass: what it does, graphs, why it is right; from the docstring of its class."""
    lines = [f"### `{p.name}` {{ #{_anchor(p)} }}\n"]
    for paragraph in _paragraphs(inspect.getdoc(type(p)) or ""):
        if paragraph.strip() in ("Before:", "After:"):
            lines.append(f"**{paragraph.strip()[:-1]}**\n")
        elif paragraph.startswith("    "):
            lines.append(f"```text\n{dedent(paragraph)}\n```\n")
        else:
            lines.append(f"{paragraph}\n")
    lines.append(f"{EXACT[p.exactness]} Its class is [{public_name(p)}][].\n")
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    """Paragraphs of a docstring; lines of a graph that blank lines part stay one."""
    joined: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if joined and joined[-1].startswith("    ") and paragraph.startswith("    "):
            joined[-1] += "\n\n" + paragraph
        else:
            joined.append(paragraph)
    return joined


def _reference_of_passes() -> str:
    members = [p for part in passes().values() for p in part]
    options = "    options:\n      show_root_heading: true\n      members: false\n"
    return "\n".join([f"::: {public_name(p)}\n{options}" for p in members])


def _passes(what: str) -> str:
    return {"stages": stages, "table": _table_of_passes, "pages": _pages_of_passes, "reference": _reference_of_passes}[
        what
    ]()


def _there(names: str) -> str:
    """Entries of names that not every version of a package gives out."""
    return "\n\n".join([f"::: {name}" for name in names.split(",") if _is_public(name)])


def _is_public(name: str) -> bool:
    package, _, last = name.rpartition(".")
    return last in found(package).__all__


def found(name: str) -> Any:
    """The object of a dotted name, such as `dtensor.safetensors.load`: as a program finds it that imports dtensor."""
    return functools.reduce(getattr, name.split(".")[1:], dtensor)


SOURCES: dict[str, Callable[[Any], str]] = {"file": _file, "commands": _commands, "passes": _passes, "there": _there}


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    source = page.file.src_uri
    if source == "operators.md":  # shapes are no references
        markdown = SHAPE.sub(r"\\[\1\\]", markdown)
    made = _entries(_outside(_expanded(markdown), source, (config.repo_url or "").rstrip("/")))
    return BLOCK.sub(_block, made)


def _block(_: re.Match) -> str:
    """It takes seconds, which those who read the pages' text need not wait."""
    spec = importlib.util.spec_from_file_location("block", DOCS / "block.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return f'<div class="drawing">{module.drawn()}</div>'


def _entries(text: str) -> str:
    """`text` with entries that mean a function where a module of the same name would be read in its place."""

    def entry(match: re.Match) -> str:
        name = match[1]
        if inspect.ismodule(found(name)) or not _is_module(name):
            return match[0]
        last = name.rpartition(".")[2]
        return f"[](){{ #{name} }}\n\n::: {name}.{last}\n    options:\n      heading: {name}\n"

    return re.sub(r"^::: (dtensor\S*)$", entry, text, flags=re.MULTILINE)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _outside(text: str, source: str, repository: str) -> str:
    """`text`, a page's, with its links to files of the repository."""
    folder = posixpath.join("docs", posixpath.dirname(source))

    def link(found: re.Match) -> str:
        url, mark, anchor = found[3].partition("#")
        if not url or ":" in url:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, url))
        if path in PAGES_OF_FILES:
            target = posixpath.relpath(posixpath.join("docs", PAGES_OF_FILES[path]), folder)
            return f"{found[1]}[{found[2]}]({target}{mark}{anchor})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]
        return f"[{found[2]}]({repository}/blob/main/{path}{mark}{anchor})" if repository else found[2]

    return "".join([part if part.startswith("```") else LINK.sub(link, part) for part in FENCE.split(text)])
