"""Rows that something is fitted on are never rows that are measured."""

import itertools
from contextlib import nullcontext

import pytest
from datasets import Dataset, DatasetDict

from massmerge import InputError, Suite
from massmerge.evaluation.data import read_task
from massmerge.evaluation.scales import choose_scale
from massmerge.recipe import Recipe
from massmerge.research.studies import STUDIES
from massmerge.research.studies.opening import open_studies
from massmerge.research.studies.run import run_studies
from massmerge.research.studies.settings import StudySettings
from massmerge.research.studies.statics import StaticMerge
from study_suite import TASKS, WORDS, study_bundle

PAIRS = [" ".join(pair) for pair in itertools.combinations(WORDS.split(), 2)]


def write_glue(folder, **more):
    """A suite that measures the datasets' validation rows, as GLUE's do whose test rows have no labels."""
    texts = iter(PAIRS)
    for task, labels in TASKS.items():
        rows = {
            split: Dataset.from_list([{"text": next(texts), "label": f"LABEL_{i % labels}"} for i in range(count)])
            for split, count in {"train": 40, "validation": 8}.items()
        }
        DatasetDict(rows).save_to_disk(str(folder / task))
    tasks = {task: {"dataset": task, "split": "validation", "input": "text"} for task in TASKS}
    return Suite.model_validate({"tasks": tasks, **more})


def write_suite(folder, suite):
    import yaml

    (folder / "suite.yaml").write_text(yaml.safe_dump(suite.model_dump(exclude_none=True)))
    return folder / "suite.yaml"


def read(suite, folder, split, seed=0, limit=None):
    data = read_task("a", suite.tasks["a"], folder, ["LABEL_0", "LABEL_1"], image=False, split=split, seed=seed,
                     limit=limit)  # fmt: skip
    data.read_inputs()
    return [data.inputs[i] for i in range(len(data))]


def test_a_share_of_the_training_rows_is_the_split_validation_and_the_rest_stays_train(tmp_path):
    suite = write_glue(tmp_path, validation=0.1)
    measured, held, rest = (read(suite, tmp_path, split) for split in (None, "validation", "train"))
    assert (len(measured), len(held), len(rest)) == (8, 4, 36)
    assert len({*measured, *held, *rest}) == 48
    assert not set(read(suite, tmp_path, "validation", seed=7)) & set(read(suite, tmp_path, "train", seed=3))
    assert len(set(read(suite, tmp_path, "validation", limit=2)) & set(held)) == 2


def test_a_task_may_say_its_own_share():
    said = {"dataset": "d", "input": "text", "validation": 0.5}
    suite = Suite.model_validate({"tasks": {"a": said, "b": {"dataset": "d", "input": "text"}}, "validation": 0.1})
    assert [task.validation for task in suite.tasks.values()] == [0.5, 0.1]


@pytest.mark.parametrize(
    ("measured", "more", "shared"),
    [
        (None, {"split": "validation"}, True),
        (None, {"split": "validation", "validation": 0.1}, False),
        (None, {"split": "validation_matched", "validation": 0.1}, False),
        (None, {"split": "train", "validation": 0.1}, True),
        (None, {}, False),
        ("validation", {}, True),
        ("validation", {"validation": 0.1}, True),
        ("train", {"validation": 0.1}, False),
    ],
)
def test_splits_share_rows_if_they_lie_in_one_place_and_are_not_parts_of_it(measured, more, shared):
    suite = Suite.model_validate({"tasks": {"a": {"dataset": "d", "input": "text", **more}}})
    words = r"split 'validation' of a contains the rows being measured.*`validation: 0\.1`"
    with pytest.raises(InputError, match=words) if shared else nullcontext():
        suite.refuse_measured_rows(measured)


def test_studies_fit_nothing_on_the_rows_that_they_measure(root, tmp_path):
    bundle, settings = study_bundle(root), StudySettings()
    recipe = bundle.parent / "recipe.yaml"
    path = write_suite(tmp_path, write_glue(tmp_path))
    with pytest.raises(InputError, match=r"study routers: it needs rows of the split 'validation'.*that are measured"):
        run_studies("routers", path, tmp_path / "out", bundle=bundle)
    same = open_studies([STUDIES["methods"]], path, tmp_path / "out", settings, bundle=bundle, recipe=recipe).context
    assert StaticMerge(same, "task_arithmetic").scale == (0.3, False)


def test_studies_take_a_share_of_the_training_rows_instead(root, tmp_path):
    path = write_suite(tmp_path, write_glue(tmp_path, validation=0.25))
    context = open_studies(
        [STUDIES["routers"]], path, tmp_path / "out", StudySettings(), bundle=study_bundle(root)
    ).context
    measured = {context.input(sample) for sample in context.samples}
    other = context.validation
    support = [item for items in context.support(16).values() for item in items]
    assert {other.input(sample) for sample in other.samples} == set(support)
    assert len(support) == 30 and not measured & set(support)


def test_the_scale_of_a_static_merge_is_not_chosen_on_the_rows_that_are_measured(root, tmp_path):
    folder = study_bundle(root).parent
    recipe = Recipe.load(folder / "recipe.yaml")
    recipe = Recipe.model_validate({**recipe.model_dump(exclude={"merge"}), "merge": {"method": "task_arithmetic"}})
    path = write_suite(tmp_path, write_glue(tmp_path))
    with pytest.raises(InputError, match=r"a, b, c contains the rows being measured"):
        choose_scale(recipe, path, tmp_path / "work", folder=folder)
    assert not (tmp_path / "work").exists()
    path = write_suite(tmp_path, Suite.load(path).model_copy(update={"validation": 0.25}))
    assert choose_scale(recipe, path, tmp_path / "work", folder=folder, limit=4).scale > 0
