"""The notebook of the first hour gives the outputs that it is stored with, and none of them names this machine."""

import json
import re
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parent.parent.parent / "examples" / "first_hour.ipynb"
CELLS = [cell for cell in json.loads(BOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def stored(cell):
    """What a cell shows: its text, the kinds of its pictures, and the name of its error."""
    text, kinds, error = "", set(), ""
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            text += "".join(output["text"])
        elif output["output_type"] == "error":
            error = output["ename"]
        else:
            text += "".join(output["data"]["text/plain"]) + "\n"
            kinds |= set(output["data"]) - {"text/plain"}
    return merged(text), kinds, error


def merged(text):
    """Equal lines that the ranks printed so far apart that each stands for itself, as one. What a busy machine tells of
    work that takes longer than four seconds is left out."""
    text = re.sub(r"(?m)^(rank 0|rank 1|ranks 0, 1): [\d:]{8} dtensor, rank \d: .*\n?", "", text)
    return re.sub(r"rank [01]: (.*)\nrank [01]: \1(?=\n|$)", r"ranks 0, 1: \1", text).strip()


@pytest.fixture
def shell(capsys):
    """A shell of IPython in this process, in which `%%ranks` is there as it is in a notebook."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    made = interactive.InteractiveShell.instance(config=config)
    yield made
    interactive.InteractiveShell.clear_instance()


def test_cells(shell, capsys):
    """In a shell of IPython, without Inductor and the protocol between a kernel and its page."""
    for cell in CELLS:
        source = "".join(cell["source"])
        source = source.replace("fullgraph=True", 'fullgraph=True, options={"inner": "aot_eager"}')
        source = source.replace("ranks.run(train_sharded);", "_ = ranks.run(train_sharded)")
        done = shell.run_cell(source, store_history=False)
        printed = re.sub(r"(?m)^Out\[\d*\]: *\n?", "", capsys.readouterr().out)
        text, kinds, error = stored(cell)
        if error:
            assert type(done.error_in_exec).__name__ == error
            assert "MixedTensorError" in printed
            continue
        assert done.error_in_exec is None
        assert merged(printed) == text
        if kinds:
            assert kinds < set(done.result._repr_mimebundle_())


@pytest.mark.nightly
def test_in_a_notebook():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(BOOK, 4)
    expected = [stored(cell) for cell in CELLS]
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
    assert [stored(cell) for cell in book.cells if cell["cell_type"] == "code"] == expected


def test_it_names_no_machine():
    text = BOOK.read_text()
    assert not re.search(r"/(tmp|home|root|Users|work|usr)/", text)
    assert len(text) < 60_000
