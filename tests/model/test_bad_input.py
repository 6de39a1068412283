"""Every way in which the input of a merge can be wrong: told by name with the remedy, exit code 2, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from massmerge import merge
from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.cli.main import main
from models import FAMILIES, contents, write_family

QUERY = "encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    write_family(folder, "bert", {"red": 2, "green": 3})
    return folder


@pytest.fixture
def folder(clean, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(clean, tmp_path / "work"))


def recipe(old: str, new: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        text = (folder / "recipe.yaml").read_text()
        assert old in text
        (folder / "recipe.yaml").write_text(text.replace(old, new))

    return spoil


def tensors(place: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / place / "model.safetensors"
        state = {name: value.clone() for name, value in load_file(path).items()}
        change(state)
        path.unlink()
        save_file(state, path, {"format": "pt"})

    return spoil


def config(place: str, **changes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / place / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def instead(place: str, name: str, **changes) -> Callable[[Path], None]:
    """Another model in the expert's place."""

    def spoil(folder: Path) -> None:
        family = FAMILIES[name]
        shutil.rmtree(folder / place)
        family.expert(family.make_config(**changes)).save_pretrained(folder / place)

    return spoil


def set_value(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda state: state[name].view(-1)[3:4].fill_(value)


def cut(place: str, keep: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / place / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    return spoil


class Surprise:
    def __reduce__(self):
        return print, ("code that a pickle runs",)


def pickled(content: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "red" / "model.safetensors").unlink()
        torch.save(content, folder / "red" / "pytorch_model.bin")

    return spoil


def linear_head(rows: int, labels: list[str], value: float = 1.0) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        save_file({"weight": torch.full((rows, 32), value)}, folder / "head.safetensors")
        head = f"expert: red\n  head: {{weights: head.safetensors, labels: {json.dumps(labels)}}}"
        recipe("expert: red", head)(folder)

    return spoil


ROWS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "an unknown key": (recipe("base:", "bse: x\nbase:"), ("recipe.yaml:1: unknown key 'bse' (known here: base, tasks",)),
    "a wrong type": (recipe("name: red", "name: [red]"), ("recipe.yaml:3: 'tasks.0.name': should be a valid string",)),
    "no base": (lambda f: shutil.rmtree(f / "base"), ("base: base: no such file or folder", "Check the path")),
    "no expert": (lambda f: shutil.rmtree(f / "red"), ("task red: red: no such file or folder", "Check the path")),
    "no expert's file": (recipe("expert: red", "expert: ./red.pt"), ("task red: ./red.pt: no such file or folder",)),
    "no weights": (
        lambda f: (f / "red/model.safetensors").unlink(),
        ("task red (red)", "contains no weights; looked for model.safetensors")),
    "two tasks of one name": (recipe("name: green", "name: red"), ("two tasks are called 'red': give each its own name",)),
    "no folder name": (recipe("name: red", "name: ../red"), ("recipe.yaml:3", "'../red' is not a valid task name")),
    "another architecture": (
        instead("red", "vit"),
        ("task red (red)", "not a fine-tuned version", "it is a ViTForImageClassification, the base is a BertModel.",
         "the base has these, the expert does not", QUERY)),
    "another size": (
        instead("red", "bert", hidden_size=16),
        ("task red (red)", "not a fine-tuned version of the base", f"{QUERY}: (16, 16) against (32, 32)",
         "embeddings.LayerNorm.bias: (16,) against (32,)")),
    "more layers": (
        instead("red", "bert", num_hidden_layers=3),
        ("task red (red)", "the expert has these, the base does not", "encoder.layer.2.output.dense.weight")),
    "fewer layers": (
        instead("red", "bert", num_hidden_layers=1),
        ("task red (red)", "the base has these, the expert does not", "encoder.layer.1.output.dense.weight")),
    "a tensor is lacking": (
        tensors("red", lambda s: s.pop(f"bert.{QUERY}")), ("task red (red)", f"the expert lacks:\n    bert.{QUERY}")),
    "another vocabulary": (
        instead("red", "bert", vocab_size=61),
        ("task red (red)", "(61, 32) against (60, 32)", "The vocabulary has another size: resize the expert's embeddings")),
    "NaN in an expert": (
        tensors("green", set_value(f"bert.{QUERY}", torch.nan)),
        ("task green (green)", f"{QUERY} holds NaN or infinity. Fine-tune or save it again.")),
    "infinity in an expert's bias": (
        tensors("green", set_value("bert.encoder.layer.1.output.dense.bias", torch.inf)),
        ("task green (green)", "encoder.layer.1.output.dense.bias holds NaN or infinity")),
    "numbers next to infinity in an expert": (
        tensors("green", set_value(f"bert.{QUERY}", 1e37)),
        ("task green (green)", f"{QUERY} holds numbers up to 1.0e+37, too large for float32")),
    "NaN in the base": (tensors("base", set_value(QUERY, torch.nan)), ("base (base)", f"{QUERY} holds NaN or infinity")),
    "NaN in a head": (
        tensors("red", set_value("classifier.weight", torch.nan)),
        ("task red (red)", "its head: classifier.weight holds NaN or infinity", "save it again")),
    "infinity in a head's file": (
        linear_head(2, ["a", "b"], torch.inf), ("task red (red)", "its head: weight holds NaN or infinity")),
    "a file cut short": (cut("red", 5000), ("red/model.safetensors: damaged", "Download or save it again")),
    "a file cut in its header": (cut("red", 100), ("red/model.safetensors", "Download or save it again")),
    "an empty file": (cut("red", 0), ("red/model.safetensors", "Download or save it again")),
    "a base cut short": (cut("base", 5000), ("base/model.safetensors: damaged", "Download or save it again")),
    "a pickle that runs code": (
        pickled({"weight": Surprise()}),
        ("red/pytorch_model.bin: holds more than tensors", "Save its state dict as safetensors")),
    "a pickle of something else": (pickled([1, 2]), ("red/pytorch_model.bin: not a state dict", "model.state_dict()")),
    "a config that is no JSON": (
        lambda f: (f / "red/config.json").write_text("{"), ("task red (red)", "red/config.json", "cannot read")),
    "labels that do not match the head": (
        config("red", id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2}),
        ("task red (red)", "does not match the 3 labels of its config.json", "Correct id2label")),
    "labels in the recipe that do not match the head": (
        recipe("expert: red", "expert: red\n  labels: [a, b, c]"),
        ("task red (red)", "has 3 labels, but its head has 2 outputs. Give one label for each output")),
    "labels that do not match a head's file": (
        linear_head(4, ["a", "b"]), ("task red (red)", "has 2 labels, but its head has 4 outputs")),
    "a rank larger than every matrix": (
        recipe("tasks:", "merge: {rank: 33}\ntasks:"), ("rank: 33 is larger than every matrix", "Give at most 32")),
    "no tasks": (
        lambda f: (f / "recipe.yaml").write_text("base: base\ntasks: []\n"),
        ("recipe.yaml:2: 'tasks' is empty; give at least one",)),
    "an empty recipe": (lambda f: (f / "recipe.yaml").write_text(""), ("recipe.yaml: a recipe is a mapping with the keys",)),
}  # fmt: skip


def assert_refused(result, *words: str) -> None:
    """Exit code 2 and one message that holds these words; no trace, nothing on standard output."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert all(word in result.stderr for word in words), result.stderr
    assert "error: " in result.stderr and "Traceback" not in result.output and isinstance(result.exception, SystemExit)
    assert result.stdout == ""


@pytest.mark.parametrize("row", ROWS)
def test_a_merge_of_wrong_input_is_refused_by_name_with_the_remedy_and_writes_nothing(folder, row):
    spoil, words = ROWS[row]
    spoil(folder)
    before = contents(folder)
    assert_refused(CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "out")]), *words)
    assert contents(folder) == before and not list(folder.glob(".*")) and not (folder / "out").exists()


SEEN_BY_THE_PLAN = [row for row in ROWS if "NaN" not in row and "infinity" not in row]


@pytest.mark.parametrize("row", SEEN_BY_THE_PLAN)
def test_what_headers_show_is_found_by_the_plan_already(folder, row):
    spoil, words = ROWS[row]
    spoil(folder)
    assert_refused(CliRunner().invoke(main, ["plan", str(folder / "recipe.yaml"), "-q"]), *words)


def test_folders_above_the_target_are_not_left_behind(folder):
    tensors("green", set_value(f"bert.{QUERY}", torch.nan))(folder)
    result = CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "new" / "deep" / "out")])
    assert result.exit_code == 2 and not (folder / "new").exists()


def equal_to_the_base(folder: Path) -> None:
    base = load_file(folder / "base" / "model.safetensors")
    tensors("red", lambda state: state.update({f"bert.{name}": value for name, value in base.items()}))(folder)


@pytest.mark.parametrize("method", ["mass", "tsv_m"])
def test_an_expert_equal_to_the_base_is_a_warning(folder, method):
    equal_to_the_base(folder)
    recipe("tasks:", f"merge: {{method: {method}}}\ntasks:")(folder)
    result = CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "out"), "-q"])
    assert result.exit_code == 0 and (folder / "out" / "mass.json").is_file()
    assert (
        result.stderr.startswith("warning: task red (red): is equal to the base")
        and result.stderr.count("warning") == 1
    )


@pytest.mark.parametrize("method", ["mass", "tsv_m"])
def test_an_expert_equal_to_the_base_is_an_error_when_strict(folder, method):
    equal_to_the_base(folder)
    recipe("tasks:", f"merge: {{method: {method}}}\ntasks:")(folder)
    result = CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "out"), "-q", "--strict"])
    assert_refused(result, "task red (red): is equal to the base", "Check which expert the recipe names")
    assert not (folder / "out").exists() and not list(folder.glob(".*"))


def test_a_pickle_that_runs_code_is_not_run(folder, capfd):
    pickled({"weight": Surprise()})(folder)
    CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "out")])
    assert "code that a pickle runs" not in capfd.readouterr().out


def test_several_faults_are_told_in_one_go(folder):
    instead("red", "bert", vocab_size=61)(folder)
    cut("green", 5000)(folder)
    result = CliRunner().invoke(main, ["merge", str(folder / "recipe.yaml"), str(folder / "out")])
    assert_refused(result, "task red (red)", "The vocabulary has another size", "task green (green)", "damaged")


def signed(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A manifest that someone changed and signed again."""

    def spoil(bundle: Path) -> None:
        manifest = read_manifest(bundle)
        change(manifest)
        sign_manifest(bundle, manifest)

    return spoil


def names(path: str) -> Callable[[Path], None]:
    return signed(lambda manifest: manifest["files"].update({path: manifest["files"]["README.md"]}))


def link_outside(bundle: Path) -> None:
    shutil.copy(bundle / "README.md", bundle.parent / "README.md")
    (bundle / "README.md").unlink()
    (bundle / "README.md").symlink_to(bundle.parent / "README.md")


def change_byte(bundle: Path) -> None:
    data = bytearray((bundle / "tasks/red/factors.safetensors").read_bytes())
    data[-1] ^= 1
    (bundle / "tasks/red/factors.safetensors").write_bytes(data)


def change_manifest(bundle: Path) -> None:
    (bundle / MANIFEST).write_text((bundle / MANIFEST).read_text().replace('"full"', '"fool"', 1))


BUNDLES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "a path upwards": (names("../README.md"), ("mass.json: names '../README.md'", "Do not use this bundle")),
    "an absolute path": (names("/etc/hostname"), ("mass.json: names '/etc/hostname'", "Do not use this bundle")),
    "a link that leads outside": (link_outside, ("mass.json: names 'README.md'", "outside of the bundle")),
    "a newer format": (
        signed(lambda m: m.update(format_version=99)), ("mass.json: has format version 99", "pip install -U massmerge")),
    "a changed byte": (
        change_byte, ("tasks/red/factors.safetensors: its bytes have changed", "Merge again, or copy the bundle again")),
    "a changed byte of the manifest": (change_manifest, ("mass.json: its bytes have changed", "Merge again, or copy")),
    "a missing file": (lambda b: (b / "recipe.yaml").unlink(), ("recipe.yaml: missing", "Merge again, or copy")),
    "a missing manifest": (lambda b: (b / MANIFEST).unlink(), ("not a bundle (no mass.json in it)", "mass merge")),
    "a missing bundle": (shutil.rmtree, ("bundle: no such folder",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(clean, tmp_path_factory) -> Path:
    return merge(clean / "recipe.yaml", tmp_path_factory.mktemp("made") / "out", workers=1)


@pytest.mark.parametrize("row", BUNDLES)
def test_a_bundle_that_is_wrong_is_refused_by_name_with_the_remedy(made, tmp_path, row):
    spoil, words = BUNDLES[row]
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    spoil(bundle)
    assert_refused(CliRunner().invoke(main, ["inspect", str(bundle)]), *words)
