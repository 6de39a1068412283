"""examples/clip: the paper's recipes parse, plan against the real shapes, and run with small models in place of the real."""

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import massmerge
from clip_models import OpenClip, naive_head, write_headers
from massmerge.checkpoints import find_source, open_base
from massmerge.cli.demo.example import write_clip_processor
from massmerge.merging.heads.labels import read_labels
from massmerge.merging.heads.text import read_texts, template_sets
from massmerge.recipe import TextHead

EXAMPLES = Path(__file__).parents[2] / "examples" / "clip"
spec = importlib.util.spec_from_file_location("make_clip_recipes", EXAMPLES / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
# Width, blocks and heads of the vision tower and of the text tower, patch and embedding, of the published models.
SHAPES = {
    "ViT-B-32": ((768, 12, 12), (512, 12, 8), 32, 512),
    "ViT-B-16": ((768, 12, 12), (512, 12, 8), 16, 512),
    "ViT-L-14": ((1024, 24, 16), (768, 12, 12), 14, 768),
}
CLASSES = {"cars": 196, "dtd": 47, "gtsrb": 43, "resisc45": 45, "sun397": 397, "stl10": 11, "cifar10": 11, "flowers102": 102,
           "oxford_pets": 37, "food101": 101, "cifar100": 100, "cub200": 200, "dogs": 120, "fruits360": 131}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "clip", ignore=shutil.ignore_patterns("recipe-*", "suite-*"))
    return tmp_path / "clip"


CASES = [(m, n, "paper") for m in make.MODELS for n in (8, 14, 20)]
CASES += [("ViT-B-32", 33, "paper"), ("ViT-B-32", 20, "tanganke")]


@pytest.mark.parametrize(("model", "count", "experts"), CASES)
def test_every_recipe_and_suite_parses_and_the_two_agree(folder, model, count, experts):
    paths = make.write(model, count, experts, folder)
    recipe, suite = massmerge.Recipe.load(paths[0]), massmerge.Suite.load(paths[1])
    assert len(recipe.tasks) == count - (experts == "tanganke")
    assert list(suite.tasks) == [task.name for task in recipe.tasks] and suite.shared_labels == recipe.shared_labels
    known = set()
    for task in recipe.tasks:
        assert isinstance(task.head, TextHead) and task.head.templates in template_sets()
        classes = read_texts(task.head, folder)[0]
        if task.labels is not None:  # people read these; the head is made of the authors' names
            shown = read_labels(task.labels, folder)
            assert experts == "paper" and len(shown) == len(classes)
            classes = shown
        known |= {f"{task.name}/{label}" for label in classes}
        assert len(set(classes)) == len(classes) == CLASSES.get(task.name, len(classes))
        said = suite.tasks[task.name].with_label_file(folder).labels
        assert said is None or set(said.values() if isinstance(said, dict) else said) <= set(classes)
    assert {name for group in recipe.shared_labels for name in group} <= known


def test_classes_of_a_dataset_that_grows_are_those_of_its_data(folder):
    for name in ("Training/Apple 10", "Training/Zucchini", "Test/Apple 10"):
        (folder / "data" / "fruits360" / name).mkdir(parents=True)
    tasks = {task["name"]: task for task in make.chosen_tasks("ViT-B-32", 33, "paper", folder)[0]}
    assert tasks["fruits360"]["classes"] == ["Apple 10", "Zucchini"] and tasks["dogs"]["classes"] == "dogs.txt"


PAPER_NAMES = {
    "food101": "apple_pie", "oxford_pets": "american_bulldog", "cub200": "001.Black_footed_Albatross",
    "dogs": "n02085620-Chihuahua", "kvasir": "dyed-lifted-polyps", "vegetables": "Bitter_Gourd", "weather": "fogsmog",
    "kmnist": "0", "beans": "angular_leaf_spot",
}  # fmt: skip


def test_heads_of_the_papers_experts_are_made_of_their_datas_names_and_answer_with_ours(folder):
    path = make.write("ViT-B-32", 33, "paper", folder)[0]
    tasks = {task.name: task for task in massmerge.Recipe.load(path).tasks}
    for name, expected in PAPER_NAMES.items():
        assert expected in tasks[name].head.classes and tasks[name].labels is not None
    breeds = zip(tasks["dogs"].head.classes, read_labels(tasks["dogs"].labels, folder), strict=True)
    assert all(own.partition("-")[2].replace("_", " ") == shown for own, shown in breeds)
    for task in massmerge.Recipe.load(make.write("ViT-B-32", 20, "tanganke", folder)[0]).tasks:
        assert task.labels is None, "FusionBench made its heads of the usual names"


def test_the_last_tasks_have_the_templates_that_their_experts_were_trained_with(folder):
    tasks = {task["name"]: task for task in make.chosen_tasks("ViT-B-32", 33, "paper", folder)[0]}
    sets = template_sets()
    assert sets[tasks["beans"]["templates"]][0] == "a photo of {} beans."
    assert sets[tasks["kvasir"]["templates"]][0] == "an endoscopic image of {}."
    assert sets[tasks["weather"]["templates"]][0] == "a photo of {} weather."
    assert all(task.get("templates", "photo") != "photo" for task in tasks.values())


def test_folders_of_a_download_are_read_by_their_own_names(folder):
    suite = massmerge.Suite.load(make.write("ViT-B-32", 33, "paper", folder)[1])
    assert suite.tasks["dogs"].head_label("n02085620-Chihuahua") == "Chihuahua"
    assert suite.tasks["kvasir"].head_label("normal-z-line") == "normal z-line"


def test_stl10_and_cifar10_share_their_labels(folder):
    groups = make.shared_labels(make.chosen_tasks("ViT-B-32", 20, "paper", folder)[0])
    assert ["stl10/frog", "cifar10/frog"] in groups and ["stl10/monkey", "cifar10/monkey"] in groups
    assert ["mnist/7", "svhn/7", "emnist/7"] in groups
    assert len(groups) == 21


def visual_shapes(width: int, layers: int, patch: int, embed: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an image encoder in open_clip's layout."""
    norms = {"ln_1": (width,), "ln_2": (width,)}
    shapes = {"class_embedding": (width,), "positional_embedding": ((224 // patch) ** 2 + 1, width), "proj": (width, embed),
              "conv1.weight": (width, 3, patch, patch)}  # fmt: skip
    shapes |= {f"{norm}.{part}": (width,) for norm in ("ln_pre", "ln_post") for part in ("weight", "bias")}
    for i in range(layers):
        block = f"transformer.resblocks.{i}"
        shapes |= {f"{block}.{norm}.{part}": shape for norm, shape in norms.items() for part in ("weight", "bias")}
        shapes |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
        for name, rows, columns in (("attn.out_proj", 1, 1), ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)):
            shapes |= {
                f"{block}.{name}.weight": (rows * width, columns * width),
                f"{block}.{name}.bias": (rows * width,),
            }
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def write_real_shapes(folder: Path, model: str, recipe: massmerge.Recipe) -> None:
    """The base and experts that a recipe names, as files of the published shapes without data."""
    (width, layers, heads), (text, text_layers, text_heads), patch, embed = SHAPES[model]
    vision = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": patch,
              "intermediate_size": 4 * width, "image_size": 224, "projection_dim": embed}  # fmt: skip
    words = {"hidden_size": text, "num_hidden_layers": text_layers, "num_attention_heads": text_heads,
             "intermediate_size": 4 * text, "vocab_size": 49408, "projection_dim": embed}  # fmt: skip
    config = tf.CLIPConfig(vision_config=vision, text_config=words, projection_dim=embed, architectures=["CLIPModel"])
    config.save_pretrained(folder / recipe.base)
    with torch.device("meta"):
        whole = tf.CLIPModel(config)
    write_headers(folder / recipe.base / "model.safetensors", {n: t.shape for n, t in whole.state_dict().items()})
    shapes = visual_shapes(width, layers, patch, embed)
    for task in recipe.tasks:
        write_headers(folder / task.expert / "model.safetensors", shapes)


@pytest.mark.parametrize(("model", "count"), [("ViT-B-16", 8), ("ViT-L-14", 14), ("ViT-B-32", 33)])
def test_a_recipe_plans_against_the_published_shapes(folder, model, count):
    path = make.write(model, count, "paper", folder)[0]
    recipe = massmerge.Recipe.load(path)
    write_real_shapes(folder, model, recipe)
    plan = massmerge.make_plan(path)
    assert [str(problem) for problem in plan.problems] == []
    width, layers = SHAPES[model][0][:2]
    ranks = {tensor.name: tensor.ranks for tensor in plan.tensors}
    assert plan.base_class == "CLIPVisionModelWithProjection"
    assert ranks[f"vision_model.encoder.layers.{layers - 1}.mlp.fc1.weight"] == (width // count,) * count
    assert ranks["visual_projection.weight"] == (SHAPES[model][3] // count,) * count
    assert [len(task.labels) for task in plan.tasks][:8] == [196, 47, 10, 43, 10, 45, 397, 10]


@pytest.mark.parametrize(("name", "count", "blocks"), [("ViT-L-14", 8, 21), ("ViT-B-32", 33, 10)])
def test_the_recipe_runs_from_end_to_end_with_small_models(folder, name, count, blocks):
    path = make.write(name, count, "paper", folder)[0]
    recipe = massmerge.Recipe.load(path)
    small = OpenClip(layers=blocks, text_layers=1).eval()
    torch.save(small.state_dict(), folder / "base.pt")
    opened = open_base(find_source("base.pt", folder, download=False))
    whole = tf.CLIPModel(opened.skeleton.config)
    whole.load_state_dict({name: opened.read(name) for name in opened.slots}, strict=False)
    whole.save_pretrained(folder / recipe.base)
    write_clip_processor(folder / recipe.base)
    for seed, task in enumerate(recipe.tasks):
        torch.manual_seed(seed)
        state = {
            f"model.{n}": t + torch.randn_like(t) * 0.03 if "visual." in n else t for n, t in small.state_dict().items()
        }
        (folder / task.expert).mkdir(parents=True)
        if count == 8:
            torch.save(state, folder / task.expert / "pytorch_model.bin")
        else:  # quicker to open
            save_file(state, folder / task.expert / "model.safetensors")
    massmerge.merge(path, folder / "out")
    model = massmerge.load(folder / "out")
    assert model.voters == [f"M{blocks - 1}.cls"] and len(model.labels["sun397"]) == 397 and len(model.tasks) == count
    answers = model.predict({"pixel_values": torch.randn(4, 3, 32, 32)})
    assert all(answer.label in model.labels[answer.task] and len(answer.routing.selected) <= 3 for answer in answers)
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / recipe.base)
    templates = list(template_sets()["dtd"])
    wanted = naive_head(small.encode_text, tokenizer, small.logit_scale.exp(), ["banded"], templates)
    kept = load_file(folder / "out" / "tasks" / "dtd" / "head" / "model.safetensors")["weight"]
    assert torch.allclose(kept[:1], wanted, atol=1e-4)
