"""Tables of labelled rows, as they are written and as a suite reads them."""

import io
import json

import pyarrow
from PIL import Image
from pyarrow import parquet

from massmerge.evaluation.data import read_task
from massmerge.evaluation.suite import SuiteTask

ROWS = [{"text": f"text {i}", "other": f"more {i}", "label": "xyx"[i % 3]} for i in range(6)]


def write_table(path, rows):
    """Rows, by column, in the format that the name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        lines = [list(rows[0]), *(["" if v is None else str(v) for v in row.values()] for row in rows)]
        path.write_text("".join(mark.join(line) + "\n" for line in lines))
    return path


def read_rows(place, known=("x", "y"), image=False, task="a", options=None, **more):
    """The rows of one task: their inputs and labels."""
    data = read_task(task, SuiteTask(**more), place, known, image=image, **(options or {}))
    data.read_inputs()
    return [data.inputs[i] for i in range(len(data))], data.labels


def png(size=(4, 3)):
    """A red picture as bytes."""
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()
