"""The notebook runs from an empty folder, cell after cell."""

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_the_quickstart_runs_and_answers(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # `mass` is the command beside this Python, whether or not its folder is on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)], cwd=tmp_path, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "['spam', 'topic', 'mood']" in ran.stdout and "confidence" in ran.stdout


def test_the_quickstart_is_stored_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert all(
        not cell["outputs"] and cell["execution_count"] is None for cell in notebook["cells"] if "outputs" in cell
    )
