"""CLIP and SigLIP: heads made of texts, and the layout of OpenAI and open_clip."""

import json
import re

import pytest
import torch
import transformers as tf
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import massmerge
from clip_models import CLASSES, OpenClip, make_clip, naive_head, write_clip
from massmerge.checkpoints import find_source, narrow, open_base, open_expert
from massmerge.checkpoints.open_clip import OpenClipStore
from massmerge.checkpoints.towers import vision_tower
from massmerge.cli.demo.example import write_clip_processor
from massmerge.cli.main import main
from massmerge.errors import InputError
from massmerge.io.tensor_file import tensor_bytes
from massmerge.merging.heads.text import template_sets
from massmerge.model.export import export_bundle
from massmerge.research.interpret import interpret
from models import logits_of, rows_of

TEMPLATES = ["a photo of a {}.", "the {} of my friend."]
HEADS = {
    "pets": {"classes": CLASSES, "templates": TEMPLATES},
    "cars": {"classes": ["van", "bus"], "templates": "photo"},
}


def write_recipe(folder, experts, base="base", **sections):
    tasks = [{"name": name, "expert": expert, "head": HEADS[name]} for name, expert in experts.items()]
    data = {"base": base, "tasks": tasks, "merge": {"rank": 64}, **sections}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module", params=["clip", "siglip"])
def towers(request, tmp_path_factory):
    """A merged bundle of fine-tuned vision towers with heads of texts, beside its sources."""
    folder = write_clip(tmp_path_factory.mktemp(request.param), request.param)
    massmerge.merge(write_recipe(folder, {"pets": "pets", "cars": "cars"}), folder / "out")
    return folder


def pixels(count=3):
    return {"pixel_values": torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))}


@torch.inference_mode()
def naive_logits(folder, task):
    """The whole model with the expert's tower, image by image and text by text."""
    model = tf.AutoModel.from_pretrained(folder / "base").eval()
    model.vision_model.load_state_dict(type(model.vision_model).from_pretrained(folder / task).state_dict())
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "base")
    siglip = hasattr(model, "logit_bias")

    def encode(ids):
        if siglip:
            ids = F.pad(ids, (0, 77 - ids.shape[1]), value=tokenizer.pad_token_id)
        return model.get_text_features(input_ids=ids).pooler_output

    templates = HEADS[task]["templates"]
    templates = ["a photo of a {}."] if templates == "photo" else templates
    weight = naive_head(encode, tokenizer, model.logit_scale.exp(), HEADS[task]["classes"], templates)
    images = F.normalize(model.get_image_features(**pixels()).pooler_output, dim=-1)
    return images @ weight.mT + (model.logit_bias if siglip else 0.0)


@pytest.mark.parametrize("task", ["pets", "cars"])
def test_a_head_of_texts_answers_as_the_whole_model_does(towers, task):
    wanted = naive_logits(towers, task)
    model = massmerge.load(towers / "out")
    for row, prediction in zip(wanted, model.predict(rows_of(pixels()), task=task, top=3), strict=True):
        found = logits_of(prediction)
        for label, value in zip(HEADS[task]["classes"], row.tolist(), strict=True):
            assert found[task, label] == pytest.approx(value, abs=2e-3)


def test_the_bundle_keeps_the_head_and_does_without_the_text_tower(towers):
    manifest = json.loads((towers / "out" / "mass.json").read_text())
    assert "Vision" in manifest["base"]["class"]
    assert not any(name.startswith("text_model") for name in load_file(towers / "out" / "base" / "model.safetensors"))
    assert (towers / "out" / "tasks" / "pets" / "head" / "model.safetensors").is_file()
    assert len(massmerge.load(towers / "out").predict(rows_of(pixels()))) == 3


def test_a_tower_is_exported_with_its_projection(towers, tmp_path):
    part = export_bundle(towers / "out", tmp_path / "hf", "hf", ["pets"]).parts[0]
    assert part.head == "beside" and part.difference < 1e-4
    assert export_bundle(towers / "out", tmp_path / "peft", "peft", ["cars"]).parts[0].difference < 1e-4


@pytest.mark.parametrize("towers", ["clip"], indirect=True)
def test_an_onnx_file_of_a_tower_answers_with_the_logits_of_its_texts(towers, tmp_path):
    import onnxruntime

    part = export_bundle(towers / "out", tmp_path / "out", "onnx", ["pets"]).parts[0]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {name: tensor.numpy() for name, tensor in pixels().items()})[0]
    assert torch.allclose(torch.from_numpy(found), naive_logits(towers, "pets"), atol=2e-3)
    assert part.head == "inside" and json.loads((tmp_path / "out" / "labels.json").read_text()) == CLASSES


def test_a_head_file_is_the_head_that_a_merge_makes(towers, tmp_path):
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    options = [part for template in TEMPLATES for part in ("--template", template)]
    call = ["head", str(towers / "base"), str(tmp_path / "classes.txt"), str(tmp_path / "head.safetensors"), *options]
    result = CliRunner().invoke(main, [*call, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["classes"] == 3
    made, kept = (
        load_file(tmp_path / "head.safetensors"),
        load_file(towers / "out" / "tasks" / "pets" / "head" / "model.safetensors"),
    )
    assert made.keys() == kept.keys()
    assert all(torch.allclose(made[name], kept[name], atol=1e-5) for name in made)


# The layout of OpenAI and open_clip


@pytest.fixture(scope="module")
def open_clip(tmp_path_factory):
    """A base and two experts in that layout, their models, and the merged bundle."""
    folder = tmp_path_factory.mktemp("open_clip")
    torch.manual_seed(5)
    base = OpenClip().eval()
    torch.save(base.state_dict(), folder / "base.pt")
    write_clip_processor(folder / "processor")
    experts = {}
    for seed, task in enumerate(("pets", "cars")):
        experts[task] = expert = OpenClip().eval()
        expert.load_state_dict(base.state_dict())
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in expert.visual.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
    # One expert as a whole model under `model.`, one as the image half alone.
    torch.save({f"model.{name}": t for name, t in experts["pets"].state_dict().items()}, folder / "pets.pt")
    image = {name: t for name, t in experts["cars"].state_dict().items() if name.startswith("visual.")}
    save_file(image, folder / "cars.safetensors")
    recipe = write_recipe(folder, {"pets": "pets.pt", "cars": "cars.safetensors"}, "base.pt", processor="processor")
    massmerge.merge(recipe, folder / "out")
    return folder, base, experts


def test_a_state_dict_of_that_layout_gives_the_outputs_of_its_own_forward(open_clip):
    folder, base, _ = open_clip
    opened = open_base(find_source("base.pt", folder, download=False))
    model = tf.CLIPModel(opened.skeleton.config).eval()
    model.load_state_dict({name: opened.read(name) for name in opened.slots}, strict=False)
    ids = torch.tensor([[83, 3, 9, 5, 2, 87], [83, 1, 1, 87, 87, 87]]).clamp_max(
        base.token_embedding.num_embeddings - 1
    )
    with torch.inference_mode():
        assert torch.allclose(
            model.get_image_features(**pixels()).pooler_output,
            base.encode_image(pixels()["pixel_values"]),
            atol=1e-5,
        )
        assert torch.allclose(model.get_text_features(input_ids=ids).pooler_output, base.encode_text(ids), atol=1e-5)


@pytest.mark.parametrize("task", ["pets", "cars"])
def test_experts_of_that_layout_answer_from_a_bundle(open_clip, task):
    folder, base, experts = open_clip
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "processor")
    templates = TEMPLATES if task == "pets" else ["a photo of a {}."]
    weight = naive_head(base.encode_text, tokenizer, base.logit_scale.exp(), HEADS[task]["classes"], templates)
    with torch.inference_mode():
        wanted = F.normalize(experts[task].encode_image(pixels()["pixel_values"]), dim=-1) @ weight.mT
    for row, prediction in zip(
        wanted, massmerge.load(folder / "out").predict(rows_of(pixels()), task=task, top=3), strict=True
    ):
        found = logits_of(prediction)
        assert [found[task, label] for label in HEADS[task]["classes"]] == pytest.approx(row.tolist(), abs=2e-3)


@pytest.mark.parametrize("file", ["pets.pt", "cars.safetensors"])
def test_what_an_expert_of_that_layout_changes_is_seen_in_the_first_bytes(open_clip, file, monkeypatch):
    base = open_base(find_source("base.pt", open_clip[0], download=False))
    base = narrow(base, vision_tower(base))
    expert = open_expert(find_source(file, open_clip[0], download=False), base)
    for store, names in ((base.store, base.slots), (expert.store, expert.names())):
        starts = {name: store.start(name) for name in names}
        transposed = {name for name in names if name.endswith("_projection.weight")}
        assert {name for name, start in starts.items() if start is None} == transposed
        for name, start in starts.items():  # of a fused tensor the own third
            assert start is None or bytes(tensor_bytes(store.read(name)))[: 1 << 16] == start
    monkeypatch.setattr(OpenClipStore, "read", lambda *arguments: pytest.fail("read whole"))
    assert all(expert.changes(name, base) for name in expert.names() - {"visual_projection.weight"})


def test_experts_of_that_layout_are_decoded_by_the_towers_of_their_base(open_clip):
    folder = open_clip[0]
    found = interpret(folder / "out", [*CLASSES, "bus"], tasks=["cars"], top=2, clip=str(folder / "base.pt"))
    assert len({text.text for text in found[0].texts}) == 2


def test_another_kind_of_tower_in_that_layout_is_refused(tmp_path):
    state = OpenClip().state_dict() | {"visual.attnpool.c_proj.weight": torch.zeros(2, 2)}
    torch.save(state, tmp_path / "base.pt")
    with pytest.raises(InputError, match=r"(?s)other kinds of towers.*visual\.attnpool"):
        open_base(find_source("base.pt", tmp_path, download=False))


def test_a_base_of_that_layout_needs_both_towers(tmp_path):
    torch.save({n: t for n, t in OpenClip().state_dict().items() if n.startswith("visual.")}, tmp_path / "base.pt")
    with pytest.raises(InputError, match=r"(?s)needs both towers.*token_embedding"):
        open_base(find_source("base.pt", tmp_path, download=False))


# Wrong recipes


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("source"), tasks=("pets",))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"classes": []}, "list of classes is empty"),
        ({"classes": "empty.txt"}, r"list of classes is empty \(empty.txt\)"),
        ({"classes": ["cat", "dog", "cat"]}, "'cat' more than once"),
        ({"classes": ["cat"], "templates": ["a photo."]}, r"no placeholder for the class: 'a photo.'. Write \{\}"),
        ({"classes": ["cat"], "templates": []}, "there are none"),
        ({"classes": ["cat"], "templates": "poster"}, "'poster' is neither a set nor a file. The sets are .*photo"),
        ({"classes": "absent.txt"}, "cannot be read as labels"),
    ],
)
def test_texts_that_make_no_head_are_told_when_a_recipe_is_planned(source, head, message):
    (source / "empty.txt").write_text("\n\n")
    recipe = massmerge.Recipe.model_validate(
        {"base": "base", "tasks": [{"name": "pets", "expert": "pets", "head": head}]}
    )
    problems = massmerge.make_plan(recipe, source).problems
    assert [problem.where for problem in problems] == ["task pets (pets)"]
    assert re.search(message, problems[0].message)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("\n", [], "the list of classes is empty (classes.txt). Give at least one"),
        ("cat\ndog\ncat\n", [], "classes.txt: has 'cat' more than once. Give each class its own name."),
        ("cat\n", ["--template", "a photo"], "no placeholder for the class: 'a photo'. Write {} where the class goes"),
        ("cat\n", ["--set", "poster"], "'poster' is neither a set nor a file. The sets are photo, cars"),
    ],
)
def test_texts_that_make_no_head_are_wrong_calls(source, monkeypatch, lines, options, message):
    monkeypatch.chdir(source)
    (source / "classes.txt").write_text(lines)
    result = CliRunner().invoke(main, ["head", "base", "classes.txt", "out.safetensors", *options])
    assert result.exit_code == 2 and message in result.output
    assert not (source / "out.safetensors").exists()


def test_a_key_of_no_kind_of_head_is_told_with_the_keys_of_the_kind_that_was_meant():
    text = "base: b\ntasks:\n  - name: a\n    expert: a\n    head: {classes: [x], template: y}\n"
    with pytest.raises(InputError, match=r"recipe:5: unknown key 'tasks.0.head.template'"):
        massmerge.Recipe.parse(text)
    with pytest.raises(InputError, match=r"'tasks.0.head.labels' is missing"):
        massmerge.Recipe.parse("base: b\ntasks: [{name: a, expert: a, head: {weights: w}}]")


def test_a_base_without_a_text_tower_is_refused(source, tmp_path):
    make_clip().vision_model.save_pretrained(tmp_path / "base")
    head = {"classes": CLASSES}
    recipe = massmerge.Recipe.model_validate(
        {"base": str(tmp_path / "base"), "tasks": [{"name": "a", "expert": str(source / "pets"), "head": head}]}
    )
    with pytest.raises(InputError, match=r"has no vision tower. Text heads need a whole CLIP or SigLIP as base"):
        massmerge.make_plan(recipe, tmp_path)


def test_every_named_set_has_templates_with_a_place_for_the_class():
    sets = template_sets()
    assert all(sets.values()) and all("{}" in template for rows in sets.values() for template in rows)
    assert all(len(set(rows)) == len(rows) for rows in sets.values())
