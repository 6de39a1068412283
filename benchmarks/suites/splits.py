"""Seeded train, validation and test splits that no duplicate crosses.

Rows that are the same, or nearly, form a group, and a group lies in one split only: an expert that has seen a test row in
training would look better than it is. Splits are stratified by label, and the same seed gives the same files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.suites.near_duplicates import Rows, image_groups, normalise, text_groups
from massmerge.errors import InputError

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Caps:
    """At most so many rows in each split. A task that cannot fill them keeps at least `least_test` rows for the test."""

    train: int = 4000
    validation: int = 300
    test: int = 500
    least_test: int = 300

    @property
    def rows(self) -> int:
        """Rows in all three."""
        return self.train + self.validation + self.test


@dataclass(frozen=True)
class Split:
    """Numbers of the rows in each part, in the order in which they are written."""

    train: Rows
    validation: Rows
    test: Rows


def draw(labels: Sequence[str], most: int, seed: int) -> Rows:
    """At most `most` rows, with the labels in the proportions that they have in all rows."""
    if len(labels) <= most:
        return np.arange(len(labels))
    random = np.random.default_rng(seed)
    names = np.asarray(labels)
    kept = []
    for name in np.unique(names):
        rows = np.flatnonzero(names == name)
        kept.append(random.permutation(rows)[: max(1, int(len(rows) * most / len(names)))])
    return np.sort(np.concatenate(kept))


def make_split(labels: Sequence[str], groups: Rows, seed: int = 0, caps: Caps | None = None) -> Split:
    """Whole groups dealt to test, validation and train, label by label in the labels' proportions.

    Where most groups hold rows of many labels, as fonts hold letters, they are dealt regardless of labels.

    Raises:
        InputError: too few rows for a test split, or a label that does not stand in all splits.
    """
    caps = caps or Caps()
    names = np.asarray(labels)
    sizes = _sizes(len(names), caps)
    random = np.random.default_rng(seed)
    parts: dict[str, list[int]] = {name: [] for name in SPLITS}
    mixed = _mixed(names, groups)
    leading = np.full(len(names), "") if mixed else names
    for label, members in _groups_by_label(leading, groups, random):
        share = sum(len(m) for m in members) / len(names)
        for part in ("test", "validation"):
            quota = max(1, round(share * sizes[part]))
            members = _deal(members, quota, parts[part])
        if not members:
            raise InputError(f"{label!r} has too few rows to stand in all three splits. Leave the label out.")
        _deal(members, max(1, round(share * sizes["train"])), parts["train"])
    for name in SPLITS if mixed else ():
        missing = sorted(set(labels) - set(names[parts[name]].tolist()))
        if missing:
            raise InputError(f"{missing[0]!r} stands in no group of the {name} split. Leave the label out.")
    # Quotas of labels are rounded, so a part may come out a few rows too large.
    drawn = {name: random.permutation(np.asarray(rows, dtype=np.int64))[: sizes[name]] for name, rows in parts.items()}
    if len(drawn["test"]) < caps.least_test:
        raise InputError(
            f"only {len(drawn['test'])} test rows; {caps.least_test} are wanted. Near-duplicates fill the rest."
        )
    return Split(**drawn)


def without_repeats(values: Sequence[str] | Sequence[bytes], labels: Sequence[str]) -> Rows:
    """The first of rows that are the same; none of them where their labels contradict each other."""
    keys = [normalise(v) if isinstance(v, str) else hashlib.sha256(v).hexdigest() for v in values]
    first: dict[str, int] = {}
    contradicted: set[str] = set()
    for row, (key, label) in enumerate(zip(keys, labels, strict=True)):
        if labels[first.setdefault(key, row)] != label:
            contradicted.add(key)
    return np.asarray([row for key, row in first.items() if key not in contradicted and key], dtype=np.int64)


def write_task(
    folder: Path,
    column: Literal["text", "image"],
    values: Sequence[str] | Sequence[bytes],
    labels: Sequence[str],
    *,
    source: dict[str, Any],
    licence: str,
    threads: Sequence[str] | None = None,
    seed: int = 0,
    caps: Caps | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """Split a task's rows and write `train.parquet`, `validation.parquet`, `test.parquet` and `data.json`.

    A folder that already has its `data.json` is left as it is.

    Args:
        folder: where the files go; it appears when all of them are complete.
        column: name and kind of the input column.
        values: texts, or encoded images (PNG, JPEG, WEBP).
        labels: a class name for each.
        source: where the rows come from, kept in `data.json`.
        licence: under which licence, or "none stated".
        threads: see `text_groups` and `image_groups`.
        seed: decides every choice made here.
        caps: most rows in each split.
        threshold: likeness from which two rows are near-duplicates, if not the default of the kind.

    Returns:
        What stands in `data.json`.
    """
    caps = caps or Caps()
    if (folder / "data.json").is_file():
        return json.loads((folder / "data.json").read_text(encoding="utf-8"))
    unique = without_repeats(values, labels)
    # Twice the rows that can be used are enough to choose from, and grouping them all would take long.
    pool = unique[draw([labels[i] for i in unique], 2 * caps.rows, seed)]
    chosen = [values[i] for i in pool]
    names = [labels[i] for i in pool]
    groups = _groups(column, chosen, None if threads is None else [threads[i] for i in pool], threshold)
    split = make_split(names, groups, seed, caps)
    return _write_files(folder, column, chosen, names, split, {
        "source": source, "licence": licence, "seed": seed, "rows_found": len(values),
        "repeats_dropped": len(values) - len(unique), "near_duplicates": len(pool) - len(np.unique(groups)),
        "caps": asdict(caps),
    })  # fmt: skip


def _write_files(
    folder: Path, column: str, values: Sequence[Any], labels: Sequence[str], split: Split, about: dict[str, Any]
) -> dict[str, Any]:
    """The parts and `data.json`, in a folder that appears when it is complete; what is in `data.json`."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    counts, sums = {}, {}
    for part in SPLITS:
        rows = getattr(split, part)
        _write_rows(partial / f"{part}.parquet", column, [values[i] for i in rows], [labels[i] for i in rows])
        counts[part] = len(rows)
        sums[part] = hashlib.sha256((partial / f"{part}.parquet").read_bytes()).hexdigest()
    data = {"classes": sorted(set(labels)), "rows": counts, "sha256": sums, **about}
    (partial / "data.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return data


def _groups(column: str, values: Sequence[Any], threads: Sequence[str] | None, threshold: float | None) -> Rows:
    """Groups of near-duplicates, by the default of the kind if no threshold is given."""
    options = {} if threshold is None else {"threshold": threshold}
    return (text_groups if column == "text" else image_groups)(values, threads, **options)


def read_split(folder: Path, part: str, column: str) -> tuple[list[Any], list[str]]:
    """Inputs and labels of one split of a task."""
    path = folder / f"{part}.parquet"
    if not path.is_file():
        raise InputError(f"{path}: no such file. Run the fetch step first.")
    table = pq.read_table(path, columns=[column, "label"])
    return table[column].to_pylist(), table["label"].to_pylist()


def _write_rows(path: Path, column: str, values: Sequence[Any], labels: Sequence[str]) -> None:
    kind = pa.string() if column == "text" else pa.binary()
    table = pa.table({column: pa.array(values, kind), "label": pa.array(labels, pa.string())})
    pq.write_table(table, path, compression="zstd", row_group_size=256)


def _sizes(rows: int, caps: Caps) -> dict[str, int]:
    """Rows for each split: the caps if there are enough, else a fifth for the test and an eighth for validation."""
    if rows < 2 * caps.least_test:
        raise InputError(f"only {rows} rows: half of them would not make {caps.least_test} test rows.")
    test = min(caps.test, max(caps.least_test * 21 // 20, rows // 5))  # a little more: quotas of labels are rounded
    validation = min(caps.validation, (rows - test) // 6)
    return {"test": test, "validation": validation, "train": min(caps.train, rows - test - validation)}


def _mixed(names: NDArray[Any], groups: Rows) -> bool:
    """Whether most rows stand in groups whose rows are of several labels."""
    pairs = np.unique(np.stack([groups, np.unique(names, return_inverse=True)[1]]), axis=1)[0]
    return bool((np.bincount(pairs, minlength=groups.max() + 1) > 1)[groups].mean() > 0.5)


def _groups_by_label(
    names: NDArray[Any], groups: Rows, random: np.random.Generator
) -> Iterator[tuple[str, list[Rows]]]:
    """For each label the groups that it leads, in random order."""
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    by_label: dict[str, list[Rows]] = {str(name): [] for name in np.unique(names)}
    for members in np.split(order, bounds):
        found, counts = np.unique(names[members], return_counts=True)
        by_label[str(found[counts.argmax()])].append(members)
    for label, led in by_label.items():
        yield label, [led[i] for i in random.permutation(len(led))]


def _deal(groups: list[Rows], quota: int, into: list[int]) -> list[Rows]:
    """Put groups into a split while they fit its quota; returns those that were left."""
    left, taken = [], 0
    for members in groups:
        if taken + len(members) <= quota:
            into.extend(members.tolist())
            taken += len(members)
        else:
            left.append(members)
    return left
