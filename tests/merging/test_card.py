"""The model card: what the hub and people read of a bundle."""

import json
import shutil

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard

import massmerge as mm
from eval_suite import write_suite
from hub import serving_hub, use_hub
from massmerge.checkpoints.terms import Terms, front_matter
from models import FAMILIES, family_bundle, save_as, text_bundle, write_recipe

BERT = FAMILIES["bert"]


def card_of(folder) -> ModelCard:
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def with_card(folder, **data):
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(data)}---\n# A model\n")
    return folder


@pytest.fixture
def models(tmp_path):
    """A base and two experts of it in folders."""
    base = BERT.make_base()
    save_as(base, tmp_path / "base", "safetensors")
    for seed, name in enumerate("ab"):
        save_as(BERT.make_expert(base, seed, 3), tmp_path / name, "safetensors")
    return tmp_path


def merged(folder, base="base"):
    write_recipe(folder, {"a": "a", "b": "b"}, base=base)
    return mm.merge(folder / "recipe.yaml", folder / "out")


@pytest.mark.skipif(
    int(huggingface_hub.__version__.split(".")[0]) < 2, reason="asks huggingface.co, whatever the endpoint"
)
def test_the_card_of_a_text_bundle_is_one_that_the_hub_takes(root, tmp_path, monkeypatch):
    card = card_of(text_bundle(root))
    data = card.data.to_dict()
    assert data["library_name"] == "massmerge" and data["pipeline_tag"] == "text-classification"
    with serving_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path)
        card.validate()


def test_the_card_of_an_image_bundle_says_so(root):
    assert card_of(family_bundle(root, "vit")).data.pipeline_tag == "image-classification"


def test_folders_of_this_machine_are_not_named_as_models_of_the_hub(root):
    data = card_of(text_bundle(root)).data.to_dict()
    assert "base_model" not in data and "base_model_relation" not in data


def test_models_of_the_hub_are_named_without_their_revision(models, monkeypatch):
    commit = "c" * 40
    cache = models / "cache" / "models--me--base"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "v1").write_text(commit)
    shutil.copytree(models / "base", cache / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(models / "cache"))
    data = card_of(merged(models, base="me/base@v1")).data.to_dict()
    assert data["base_model"] == ["me/base"] and data["base_model_relation"] == "merge"


def test_licence_and_language_come_from_the_cards_of_base_and_experts(models):
    with_card(models / "base", license="mit", language="en")
    with_card(models / "a", license="mit")
    card = card_of(merged(models))
    assert card.data.license == "mit" and card.data.language == ["en"]
    assert "- base: mit\n- a: mit\n" in card.text and "The cards of b name no licence" in card.text


def test_different_licences_are_listed_and_none_is_chosen(models):
    with_card(models / "base", license="mit")
    with_card(models / "b", license="cc-by-nc-4.0")
    card = card_of(merged(models))
    assert card.data.license == "other" and "- b: cc-by-nc-4.0" in card.text


def test_a_bundle_that_is_changed_keeps_what_it_knows_of_licences(models):
    with_card(models / "base", license="mit", language=["en", "de"])
    with_card(models / "b", license="apache-2.0")
    out = merged(models)
    shutil.rmtree(models / "b")
    mm.remove(out, "a")
    data = card_of(out).data
    assert data.license == "other" and data.language == ["en", "de"]


@pytest.mark.parametrize("said", [None, 3, {"a": 1}, ["mit", "gpl"], "x" * 99, "two words", "<script>"])
def test_a_licence_that_is_none_is_as_if_it_were_not_there(said):
    assert Terms.of({"license": said}) == Terms()


@pytest.mark.parametrize("text", ["", "# no metadata", "---\nopen: [\n---\ntext", "---\n- a list\n---\ntext", "---\n"])
def test_a_card_without_metadata_has_none(text):
    assert front_matter(text) == ({}, text)


def test_the_lines_of_the_card_load_the_bundle(root, monkeypatch, capsys):
    bundle = text_bundle(root)
    code = (bundle / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(bundle)
    exec(code, {})
    assert "Prediction(task=" in capsys.readouterr().out


# Results


@pytest.fixture
def measured(root, tmp_path):
    bundle = shutil.copytree(text_bundle(root), tmp_path / "bundle")
    rows = {t: [("a text", label) for label in labels[:2]] for t, labels in mm.load(bundle).labels.items()}
    return bundle, write_suite(tmp_path, rows)


def test_results_enter_the_card_for_people_and_for_the_hub(measured):
    bundle, suite = measured
    found = mm.evaluate(bundle, suite, card=True)
    card = card_of(bundle)
    results = {(r.dataset_type, r.metric_name): r.metric_value for r in card.data.eval_results}
    for task in found.tasks:
        assert results[task.task, "accuracy, task not given"] == round(task.strict.value, 4)
        assert results[task.task, "accuracy of routing, task not given"] == round(task.routing.value, 4)
        assert f"\n| {task.task} | " in card.text
    wrong = found.confusion.worst(1)[0]
    assert f"- {wrong[0]} → {wrong[1]}: {wrong[2]}" in card.text
    assert card.text.index("## Tasks") < card.text.index("## Results") < card.text.index("## Limits")
    assert mm.verify(bundle).ok


def test_results_take_the_place_of_earlier_ones(measured):
    bundle, suite = measured
    mm.evaluate(bundle, suite, card=True)
    once = (bundle / "README.md").read_bytes()
    mm.evaluate(bundle, suite, card=True)
    assert (bundle / "README.md").read_bytes() == once


def test_no_other_file_changes_with_the_card(measured):
    bundle, suite = measured
    before = {p: p.read_bytes() for p in bundle.rglob("*") if p.is_file() and p.name not in ("README.md", "mass.json")}
    mm.evaluate(bundle, suite, card=True)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert json.loads((bundle / "mass.json").read_text())["tasks"]


def test_a_loaded_model_has_no_card(measured):
    bundle, suite = measured
    with pytest.raises(mm.InputError, match="a loaded model has no card"):
        mm.evaluate(mm.load(bundle), suite, card=True)
