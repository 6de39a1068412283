"""What methods that are built from a recipe's sources answer with: base, reader and heads."""

import pytest
import torch

from massmerge.errors import InputError
from massmerge.evaluation.from_recipe import open_answering
from massmerge.merging.open_recipe import open_recipe
from massmerge.recipe import Recipe
from models import FAMILIES, backbone_of, logits_of, rows_of, write_family, write_recipe

TASKS = {"a": 2, "b": 3}


def opened(recipe):
    return open_recipe(Recipe.load(recipe), recipe.parent, download=False)


@pytest.fixture(scope="module", params=["bert", "vit", "dinov2", "gpt2"])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_family(folder, request.param, TASKS)
    return FAMILIES[request.param], folder


@torch.inference_mode()
def test_a_head_answers_as_the_tasks_own_model_around_the_base(family):
    kind, folder = family
    parts = open_answering(opened(folder / "recipe.yaml"))
    batch = next(parts.batches(rows_of(kind.make_inputs(4)), 4))
    given = parts.answers(parts.base(**parts.call(batch)), batch, ["a", "b", "b", "a"])
    base = kind.base.from_pretrained(folder / "base").state_dict()
    for i, task in enumerate(["a", "b", "b", "a"]):
        model = kind.expert.from_pretrained(folder / task).eval()
        backbone_of(model, kind.base).load_state_dict(base, strict=False)
        wanted = model(**kind.make_inputs(4)).logits[i]
        found = logits_of(given[i])
        assert [found[task, label] for label in model.config.id2label.values()] == pytest.approx(
            wanted.tolist(), abs=1e-5
        )


def test_tensors_that_only_experts_have_are_zero_in_the_base(tmp_path):
    write_family(tmp_path, "bert", TASKS)
    base = FAMILIES["bert"].base.from_pretrained(tmp_path / "base", add_pooling_layer=False)
    base.save_pretrained(tmp_path / "base")
    parts = open_answering(opened(tmp_path / "recipe.yaml"))
    assert parts.base.pooler.dense.weight.abs().max() == 0
    assert parts.base.encoder.layer[0].output.dense.weight.abs().max() > 0


def test_a_task_without_a_head_is_refused_by_name(tmp_path):
    family = FAMILIES["clip"]
    base = family.make_base()
    base.save_pretrained(tmp_path / "base")
    family.make_expert(base, 0).save_pretrained(tmp_path / "birds")
    with pytest.raises(InputError, match="birds: no head"):
        open_answering(opened(write_recipe(tmp_path, ["birds"])))


def test_a_recipe_with_errors_is_refused(tmp_path):
    write_family(tmp_path, "bert", TASKS)
    with pytest.raises(InputError, match="missing"):
        open_answering(opened(write_recipe(tmp_path, ["a", "missing"])))
