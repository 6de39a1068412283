"""`mass predict` as tests call it, and what it has written."""

import csv
import json

from click.testing import CliRunner
from pyarrow import parquet

from massmerge.cli.main import main


def run(*arguments, stdin=None):
    return CliRunner().invoke(main, ["predict", *map(str, arguments)], input=stdin)


def rows(*arguments, stdin=None, code=0):
    """The answers as JSON lines."""
    done = run(*arguments, "--json", stdin=stdin)
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def inputs_of(path):
    """The column `input` of a file of answers."""
    if path.suffix == ".parquet":
        return parquet.read_table(path)["input"].to_pylist()
    lines = path.read_text(encoding="utf-8").splitlines()
    found = csv.DictReader(lines) if path.suffix == ".csv" else map(json.loads, lines)
    return [row["input"] for row in found]
