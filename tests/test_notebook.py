"""examples/vlm.ipynb runs from its first cell to its last and does what its text says."""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def test_notebook_runs_and_its_training_unlearns_the_mistake():
    notebook = nbformat.read(ROOT / "examples" / "vlm.ipynb", as_version=4)
    committed = [cell.get("outputs") for cell in notebook.cells if cell.cell_type == "code"]
    assert all(committed), "the committed notebook shows what every cell printed"
    paths = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, resources=paths).execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stdout"
    )
    success = re.search(r"success on 60 held-out screens: (\d+)% before, (\d+)% after", printed)
    assert success is not None, printed
    assert int(success[1]) < 40 and int(success[2]) > 90
    assert "the saved adapter says the same: True" in printed
    assert "adapter_model.safetensors" in printed
