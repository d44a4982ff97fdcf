"""The notebook among the examples runs from its first cell to its last, and starts two ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "two_ranks.ipynb"


def text_of(cell):
    """What a cell has printed."""
    return "".join(output.get("text", "") for output in cell["outputs"])


@pytest.mark.slow
@pytest.mark.timeout(300)
# Jupyter's client finds its loop of events by a deprecated function.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_ranks_train_in_a_notebook(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(shutil.copy(NOTEBOOK, tmp_path), as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    trained = re.findall(r"\[(\d)\] (\w+): rank (\d) of 2 has trained", text_of(cells[1]))
    assert sorted(trained) == [(str(rank), kind, str(rank)) for rank in range(2) for kind in ("dense", "sparse")]
    lines = re.findall(r"(\w+): 2 ranks, last loss ([\d.]+), ([\d.]+) kB sent", text_of(cells[2]))
    assert [kind for kind, _, _ in lines] == ["dense", "sparse"]
    sent = {kind: float(kilobytes) for kind, _, kilobytes in lines}
    assert 0 < sent["sparse"] < 0.5 * sent["dense"]
    assert all(float(loss) < 1.0 for _, loss, _ in lines)  # 2.3 before training
    assert any("image/png" in output.get("data", {}) for output in cells[3]["outputs"])


def test_the_notebook_holds_no_output():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]] * 4
