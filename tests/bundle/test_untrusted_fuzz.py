"""Bundles changed at random, with checksums that fit: each is opened, or refused in words and in time."""

import copy
import json
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

import massmerge
from attacks import resign
from massmerge import Bundle, MassError
from massmerge.bundle.inspect import inspect_bundle
from massmerge.bundle.manifest import sign_manifest
from massmerge.merging.verify import verify_bundle
from models import text_bundle

VALUES = [
    None,
    True,
    0,
    -1,
    3,
    7.5,
    1e300,
    10**9,
    10**30,
    "",
    "x",
    "../x",
    "AutoModel",
    [],
    [None],
    {},
    {"x": 1},
    ["x"] * 3,
]
SECONDS = 20.0  # a whole bundle of these is loaded in a tenth of one


def places(value, path=()):
    """Every place in JSON data."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def mutated(data, chance: random.Random):
    """The data with another value, or none, in a random place."""
    data = copy.deepcopy(data)
    path = chance.choice([p for p in places(data) if p])
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if chance.random() < 0.25:
        del holder[path[-1]]
    else:
        holder[path[-1]] = chance.choice(VALUES)
    return data, path


def open_in_every_way(bundle: Path) -> None:
    began = time.monotonic()
    for way in (
        lambda: inspect_bundle(Bundle(bundle)),
        lambda: verify_bundle(bundle),
        lambda: massmerge.load(bundle, check=False).predict(["free money now", "a goal"], on_error="row"),
    ):
        with suppress(MassError):
            way()
    assert time.monotonic() - began < SECONDS


def fuzz(bundle: Path, file: str, seed: int, count: int) -> list[str]:
    """What else than an opened or a refused bundle came of so many changes of a file, and of which."""
    faults = []
    chance, path = random.Random(f"{file} {seed}"), bundle / file
    original = json.loads(path.read_text())
    manifest = (bundle / "mass.json").read_text()
    for _ in range(count):
        data, place = mutated(original, chance)
        if file == "mass.json":
            sign_manifest(bundle, {key: value for key, value in data.items() if key != "sha256"})
        else:
            path.write_text(json.dumps(data))
            resign(bundle)
        try:
            open_in_every_way(bundle)
        except Exception as error:
            faults.append(f"{file}: {place} ended in {error!r}")
        finally:
            (bundle / "mass.json").write_text(manifest)
            path.write_text(json.dumps(original) if file != "mass.json" else manifest)
    return faults


@pytest.mark.parametrize(
    "file",
    ["mass.json", "base/config.json", "tasks/spam/head/config.json", "tasks/spam/labels.json",
     "processor/tokenizer_config.json", "processor/tokenizer.json"],
)  # fmt: skip
def test_a_bundle_that_was_changed_and_signed_is_opened_or_refused(root, tmp_path, file):
    bundle = Path(shutil.copytree(text_bundle(root), tmp_path / "bundle"))
    assert fuzz(bundle, file, 0, 8) == []
