"""Answers that are written, measured; and the GLUE example: parsed, planned at its real size, run with tiny models."""

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
import yaml
from click.testing import CliRunner

import massmerge
from clip_models import write_headers as write_shapes
from massmerge import InputError, Recipe, Suite
from massmerge.checkpoints.skeleton import Skeleton, build
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from massmerge.evaluation.metrics import Given, plain_text, spearman, statistic, written

GLUE = Path(__file__).parents[2] / "examples" / "glue"
TASKS = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"]


# Texts as answers


def test_a_text_is_compared_without_capitals_and_white_space():
    assert written("a", "  Not \n Acceptable ") == Given("a", "not acceptable", None)
    assert plain_text("Yes") == "yes"


@pytest.mark.parametrize(("text", "number"), [("3.8", 3.8), (" 4 ", 4.0), ("four", None), ("nan", None), ("", None)])
def test_a_text_that_is_a_number_has_it_as_its_score(text, number):
    assert written("a", text).score == number


def test_spearman_of_written_numbers_is_over_all_rows_at_once():
    generator = np.random.default_rng(0)
    truth = generator.uniform(0, 5, 40)
    texts = [f"{value:.1f}" for value in truth + generator.normal(0, 1, 40)]
    found = statistic("spearman", "stsb", [str(t) for t in truth], [written("stsb", t) for t in texts])
    whole = spearman(truth, np.array([float(t) for t in texts]))
    by_batch = np.mean(
        [spearman(truth[i : i + 8], np.array([float(t) for t in texts[i : i + 8]])) for i in range(0, 40, 8)]
    )
    assert found(np.arange(40)) == pytest.approx(whole)
    assert abs(whole - by_batch) > 1e-3


def test_an_answer_that_is_no_number_costs_its_share():
    given = [written("s", t) for t in ("1", "2", "3", "blue")]
    assert statistic("spearman", "s", ["1", "2", "3", "4"], given)(np.arange(4)) == pytest.approx(0.75)


# Prompts in suites


def test_a_prompt_is_filled_from_the_input_columns():
    suite = Suite.parse("tasks: {a: {data: t.csv, input: [x, y, z], prompt: 'is {x} {{or}} {y} {z}?'}}")
    assert suite.tasks["a"].prompted(("1", "{2}", "3")) == "is 1 {or} {2} 3?"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("input: x, prompt: 'is {y}?'", r"must name the input columns in braces \(\{x\}\); it names \{y\}"),
        ("input: [x, y], prompt: 'is {x}?'", "it names {x}"),
        ("input: x, prompt: 'is {x?'", "write a literal brace twice"),
        ("input: [x, y, z]", "more need a prompt"),
    ],
)
def test_a_prompt_that_does_not_fit_its_columns_is_an_error(task, message):
    with pytest.raises(InputError, match=message):
        Suite.parse(f"tasks: {{a: {{data: t.csv, {task}}}}}")


# An evaluation of texts


@pytest.fixture(scope="module")
def writing(tmp_path_factory):
    """The example that writes, merged at full rank, and data that have its own answers as right ones for most rows."""
    folder = tmp_path_factory.mktemp("writing")
    recipe = make_writing_example(folder)
    recipe.write_text(recipe.read_text() + "merge: {rank: 64}\n")
    massmerge.merge(recipe, folder / "out")
    model = massmerge.load(folder / "out")
    chance = random.Random(0)
    words = ["free", "win", "prize", "call", "meeting", "report", "goal", "team", "vote", "law", "cell", "star"]
    for task in model.tasks:
        texts = [" ".join(chance.sample(words, 4)) for _ in range(8)]
        answers = model.generate([f"say {text}!" for text in texts], task=task, max_new_tokens=4)
        with (folder / f"{task}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "label"])
            rows.writerows(
                (t, a.text.upper() if i < 6 else "wrong") for i, (t, a) in enumerate(zip(texts, answers, strict=True))
            )
    tasks = {t: {"data": f"{t}.csv", "input": "text", "prompt": "say {text}!"} for t in model.tasks}
    (folder / "suite.yaml").write_text(yaml.safe_dump({"tasks": tasks, "generate": {"max_new_tokens": 4}}))
    return folder


def test_texts_are_right_when_task_and_text_are(writing):
    found = massmerge.evaluate(writing / "out", writing / "suite.yaml", experts=True, folder=writing, batch_size=5)
    model = massmerge.load(writing / "out")
    for result in found.tasks:
        rows = list(csv.DictReader((writing / f"{result.task}.csv").open()))
        answers = model.generate([f"say {row['text']}!" for row in rows], max_new_tokens=4)
        hits = [
            a.task == result.task and plain_text(a.text) == plain_text(r["label"])
            for a, r in zip(answers, rows, strict=True)
        ]
        assert result.strict.value == pytest.approx(np.mean(hits))
        assert result.known.value == pytest.approx(6 / 8)
        assert result.reference == pytest.approx(6 / 8)
        assert result.routing.value == pytest.approx(np.mean([a.task == result.task for a in answers]))
    assert {row.expert == row.known for row in found.results} == {True}


def test_texts_are_not_evaluated_by_the_batch(writing):
    with pytest.raises(InputError, match="route each prompt by itself"):
        massmerge.evaluate(writing / "out", writing / "suite.yaml", route="batch")


def test_a_wrong_generation_option_of_a_suite_is_told(writing):
    suite = Suite.load(writing / "suite.yaml").model_copy(update={"generate": {"beams": 2}})
    with pytest.raises(InputError, match="generation has no option 'beams'"):
        massmerge.evaluate(writing / "out", suite, suite_folder=writing)


# The example


def test_recipes_and_suite_name_the_papers_eight_tasks():
    for name in ("recipe.yaml", "paper.yaml"):
        recipe = Recipe.load(GLUE / name)
        assert [(t.name, t.expert) for t in recipe.tasks] == [(t, f"tanganke/flan-t5-base_glue-{t}") for t in TASKS]
        assert recipe.base == "google/flan-t5-base"
    suite = Suite.load(GLUE / "suite.yaml")
    assert list(suite.tasks) == TASKS
    assert [t for t, task in suite.tasks.items() if task.metric == "spearman"] == ["stsb"]
    assert (
        suite.tasks["rte"].prompted(("A", "B")) == "Does the text: 'A' entail that 'B' is true? Provide 'yes' or 'no'."
    )
    assert suite.tasks["qnli"].head_label("not_entailment") == "no"


def local_recipe(folder: Path, name: str) -> Path:
    """One of the example's recipes with folders here in place of the hub's repositories."""
    recipe = yaml.safe_load((GLUE / name).read_text())
    recipe["base"] = "base"
    for task in recipe["tasks"]:
        task["expert"] = task["name"]
    (folder / name).write_text(yaml.safe_dump(recipe, sort_keys=False))
    return folder / name


def write_headers(folder: Path, skeleton: Skeleton) -> None:
    """A checkpoint of which only header and configuration are real."""
    write_shapes(folder / "model.safetensors", {name: slot.shape for name, slot in skeleton.slots.items()})
    config = skeleton.config.to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Base and experts with the names and shapes of Flan-T5-base, and no values."""
    folder = tmp_path_factory.mktemp("real")
    config = tf.T5Config(vocab_size=32128, d_model=768, d_ff=2048, d_kv=64, num_layers=12, num_heads=12,
                         feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)  # fmt: skip
    skeleton = build(config, "T5ForConditionalGeneration")
    skeleton.model.lm_head.weight = torch.nn.Parameter(
        torch.empty_like(skeleton.model.lm_head.weight)
    )  # its own, as in FLAN
    for name in ("base", *TASKS):
        write_headers(folder / name, Skeleton(skeleton.model))
    return folder


@pytest.mark.parametrize("name", ["recipe.yaml", "paper.yaml"])
def test_a_recipe_is_planned_at_its_real_size(real, name):
    plan = massmerge.make_plan(local_recipe(real, name))
    assert [str(problem) for problem in plan.problems] == []
    assert [task.name for task in plan.tasks] == TASKS
    assert plan.sizes.base == pytest.approx(891.6e6, rel=0.01)
    assert plan.sizes.heads == pytest.approx(8 * 32128 * 768 * 4, rel=0.001)
    assert {task.head for task in plan.tasks} == {"T5ForConditionalGeneration"}
    ranks = {tensor.name: set(tensor.ranks) for tensor in plan.tensors}
    if name == "paper.yaml":  # a rank of 1/T of the smaller side
        assert ranks["encoder.block.10.layer.0.SelfAttention.o.weight"] == {768 // 8}
        assert ranks["encoder.block.0.layer.1.DenseReluDense.wo.weight"] == {768 // 8}
    else:
        assert 1.9 < plan.sizes.ratio <= 2.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny models under the example's names, and its suite with a few rows of the same columns in place of GLUE's."""
    folder = tmp_path_factory.mktemp("glue")
    config = tf.T5Config(vocab_size=112, d_model=16, d_ff=24, d_kv=8, num_layers=11, num_decoder_layers=1, num_heads=2,
                         feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
                         eos_token_id=3)  # fmt: skip
    make_writing_example(folder / "other")
    tokenizer = tf.AutoTokenizer.from_pretrained(folder / "other" / "base")
    base = tf.T5ForConditionalGeneration(config)
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for task in TASKS:
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        base.save_pretrained(folder / task)
    suite = yaml.safe_load((GLUE / "suite.yaml").read_text())
    for task, said in suite["tasks"].items():
        columns = Suite.load(GLUE / "suite.yaml").tasks[task].columns
        values = list(said.get("labels", ["acceptable", "unacceptable"]))
        rows = [{c: f"{c} {i}" for c in columns} | {"label": i / 2 if task == "stsb" else values[i]} for i in range(2)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for key in ("dataset", "config", "split"):
            del said[key]
        said["data"] = f"{task}.jsonl"
    (folder / "suite.yaml").write_text(yaml.safe_dump({**suite, "generate": {"max_new_tokens": 2}}, sort_keys=False))
    return folder


@pytest.mark.parametrize("name", ["recipe.yaml", "paper.yaml"])
def test_a_recipe_runs_from_merge_to_figures_with_tiny_models(tiny, name):
    bundle = tiny / f"out-{name}"
    massmerge.merge(local_recipe(tiny, name), bundle)
    voters = massmerge.load(bundle).voters
    assert voters == ["O10.mean"] if name == "paper.yaml" else len(voters) > 1
    done = CliRunner().invoke(main, ["eval", str(bundle), str(tiny / "suite.yaml"), "--json", "--no-oracle"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(t["task"], t["rows"], t["failed"]) for t in found["tasks"]] == [(task, 2, 0) for task in TASKS]
