"""Tasks without heads of their own, and which features a linear head from a file reads."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file

import massmerge
from massmerge import InputError
from massmerge.bundle.manifest import read_manifest, write_manifest
from massmerge.merging.open_recipe import make_plan, open_recipe
from massmerge.recipe import Recipe
from massmerge.research.peers import PEERS
from models import FAMILIES, write_family
from problem_types import change_tensors

# Tasks without heads


def clip_recipe(tmp_path, heads, **merge):
    recipe = write_family(tmp_path, "clip", {"a": 2, "b": 2}, **{"rank": 8, **merge})
    data = yaml.safe_load(recipe.read_text())
    for task in data["tasks"]:
        if task["name"] in heads:
            save_file({"weight": torch.randn(2, 32)}, tmp_path / f"{task['name']}.safetensors")
            task["head"] = {"weights": f"{task['name']}.safetensors", "labels": ["cat", "dog"]}
    recipe.write_text(yaml.safe_dump(data))
    return recipe


def test_a_task_without_a_head_beside_others_is_refused_by_plan_and_merge(tmp_path):
    recipe = clip_recipe(tmp_path, "a")
    (problem,) = make_plan(recipe).errors
    assert problem.where == "task b" and "no head that gives labels" in problem.message and "`head:`" in problem.message
    with pytest.raises(InputError, match="task b: has no head"):
        massmerge.merge(recipe, tmp_path / "bundle")


def test_tasks_of_which_none_has_a_head_are_merged(tmp_path):
    assert not make_plan(clip_recipe(tmp_path, "")).problems


def test_a_static_merge_needs_no_heads(tmp_path):
    recipe = clip_recipe(tmp_path, "a")
    data = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump({**data, "merge": {"method": "average"}}))
    assert not make_plan(recipe).errors


@pytest.fixture
def headless(tmp_path):
    """A bundle as older versions wrote it: one of its two tasks has no head."""
    bundle = massmerge.merge(clip_recipe(tmp_path, "ab"), tmp_path / "bundle")
    for name in ("labels.json", "head/linear.json", "head/model.safetensors"):
        (bundle / "tasks" / "b" / name).unlink()
    manifest = read_manifest(bundle)
    manifest["tasks"][1]["head"] = "none"
    write_manifest(bundle, {k: v for k, v in manifest.items() if k not in ("files", "sha256")})
    return bundle


def test_a_bundle_with_a_task_without_a_head_answers_with_the_others(headless):
    model = massmerge.load(headless)
    rows = list(FAMILIES["clip"].make_inputs(12)["pixel_values"])
    found = model.predict(rows, on_error="row")
    for prediction, routing in zip(found, model.route(rows), strict=True):
        if routing.selected == ["a"]:
            assert prediction.task == "a" and prediction.label in ("cat", "dog")
        else:
            assert prediction.task is None and prediction.error == "belongs to b, which has no head to answer with."
    with pytest.raises(InputError, match=r"^b: no head"):
        model.predict(rows, task="b")


def test_such_a_bundle_can_still_be_changed(headless, tmp_path):
    massmerge.remove(headless, ["b"], out=tmp_path / "one")
    assert massmerge.load(tmp_path / "one").tasks == ["a"]


# What a linear head reads


def pooled_recipe(tmp_path, trained, **head):
    """Two text experts with linear heads from files; the pooler of `a` is the base's unless it was trained."""
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 2}, rank=4)
    base = FAMILIES["bert"].make_base().state_dict()
    if not trained:
        change_tensors(
            tmp_path / "a",
            lambda state: state.update({f"bert.{n}": t.clone() for n, t in base.items() if n.startswith("pooler.")}),
        )
    data = yaml.safe_load(recipe.read_text())
    save_file({"weight": torch.randn(2, 32)}, tmp_path / "a.safetensors")
    data["tasks"][0]["head"] = {"weights": "a.safetensors", "labels": ["x", "y"], **head}
    recipe.write_text(yaml.safe_dump(data))
    return recipe


class Heard:
    """Keeps the warnings of a merge."""

    def __init__(self):
        self.warnings = []

    def start(self, total, done): ...
    def tensor(self, name): ...
    def phase(self, name): ...

    def warning(self, problem):
        self.warnings.append(problem)


@pytest.mark.parametrize(
    ("trained", "head", "features"),
    [(False, {}, "mean"), (True, {}, "auto"), (False, {"features": "pooled"}, "pooled")],
    ids=["never trained", "trained", "told"],
)
def test_a_head_reads_a_pooler_only_if_it_was_trained_or_told(tmp_path, trained, head, features):
    heard = Heard()
    bundle = massmerge.merge(pooled_recipe(tmp_path, trained, **head), tmp_path / "bundle", progress=heard)
    options = json.loads((bundle / "tasks/a/head/linear.json").read_text())
    assert options["features"] == features
    told = [p for p in heard.warnings if "pooler" in p.message]
    assert len(told) == (features == "mean")
    assert all("task a (a)" in p.where and "Set `features: pooled`" in p.message for p in told)


def test_a_peer_reads_what_the_bundle_would(tmp_path):
    peer = PEERS["smile_1"](
        open_recipe(Recipe.load(pooled_recipe(tmp_path, False)), tmp_path, download=True), gate=4, rank=6
    )
    assert peer.core.heads["a"]._options.features == "mean"
