import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from changes import run, write_adapter, write_decoder
from massmerge import Bundle, InputError, make_plan, merge
from massmerge.bundle.layout import BASE_WEIGHTS, MANIFEST
from massmerge.checkpoints import skeleton
from massmerge.checkpoints.pretrained import empty_model
from massmerge.io import tensor_file as tensorfile
from massmerge.merging.costs import ENTRY_SECONDS, entrywise_seconds, merge_seconds, peak_memory
from massmerge.merging.plan import Sizes, TensorPlan
from massmerge.merging.verify import verify_bundle
from models import FAMILIES, rewrite, save_as, write_family, write_recipe, write_shifted

COUNTS = (4, 8, 14, 20)


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> Path:
    """A base of 3.5 MB, large enough that what is no weight does not decide, and twenty experts."""
    folder = tmp_path_factory.mktemp("twenty")
    family = FAMILIES["bert"]
    base = family.make_base(hidden_size=128, intermediate_size=512, vocab_size=3000)
    base.save_pretrained(folder / "base")
    state = base.state_dict()
    for i in range(20):
        torch.manual_seed(i)
        expert = {f"bert.{name}": value + 0.02 * torch.randn_like(value) for name, value in state.items()}
        head = {"classifier.weight": torch.randn(2, 128), "classifier.bias": torch.zeros(2)}
        (folder / f"task{i}").mkdir()
        save_file(expert | head, folder / f"task{i}" / "model.safetensors", {"format": "pt"})
        config = base.config.to_dict() | {"architectures": ["BertForSequenceClassification"]}
        (folder / f"task{i}" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("first_pass", ["base", "fixed"])
@pytest.mark.parametrize("count", COUNTS)
def test_a_bundle_weighs_at_most_twice_the_base_and_what_its_plan_said(twenty, tmp_path, count, first_pass):
    tasks = [f"task{i}" for i in range(count)]
    recipe = write_recipe(twenty, tasks, name=f"{count}{first_pass}.yaml", router={"first_pass": first_pass})
    plan, bundle = make_plan(recipe), Bundle(merge(recipe, tmp_path / "out"))
    files = {p.relative_to(bundle.path).as_posix(): p.stat().st_size for p in bundle.path.rglob("*") if p.is_file()}
    heads = sum(n for name, n in files.items() if "/head/" in name or name.endswith("labels.json"))
    base = (twenty / "base" / "model.safetensors").stat().st_size
    counted = sum(files.values()) - heads
    assert 1.85 * base < counted <= 2.00 * base
    assert bundle.counted_bytes == counted and MANIFEST in files
    assert counted <= plan.sizes.counted <= 1.02 * counted
    assert plan.sizes.base == files[BASE_WEIGHTS]
    assert [p.ranks for p in plan.matrices] == [tuple(bundle.ranks[p.name]) for p in plan.matrices]


@pytest.mark.parametrize("first_pass", ["base", "fixed"])
def test_the_budget_is_spent_on_what_the_experts_change(twenty, tmp_path, first_pass):
    frozen = "bert.embeddings.word_embeddings.weight"  # two fifths of the base
    table = load_file(twenty / "base" / "model.safetensors")[frozen.removeprefix("bert.")]
    for task in ("task0", "task1", "task2"):
        shutil.copytree(twenty / task, tmp_path / task)
        rewrite(tmp_path / task, lambda state: state | {frozen: table})
    recipe = write_recipe(
        tmp_path, ["task0", "task1", "task2"], base=str(twenty / "base"), router={"first_pass": first_pass}
    )
    plan, bundle = make_plan(recipe), Bundle(merge(recipe, tmp_path / "out"))
    assert frozen.removeprefix("bert.") not in {t.name for t in plan.tensors}
    assert 1.95 < bundle.counted_bytes / bundle.base_bytes <= 2.0
    assert bundle.counted_bytes <= plan.sizes.counted <= 1.02 * bundle.counted_bytes and plan.ranks_exact
    assert verify_bundle(bundle.path, experts=True, folder=tmp_path).ok


def test_a_tensor_that_one_expert_alone_changes_gets_ranks_for_that_one(small, tmp_path):
    name = "encoder.layer.0.output.dense.weight"
    shutil.copytree(small, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path / "red", lambda s: s | {f"bert.{name}": load_file(small / "base" / "model.safetensors")[name]})
    (tensor,) = [t for t in make_plan(tmp_path / "recipe.yaml").tensors if t.name == name]
    assert tensor.ranks[0] == 0 and tensor.ranks[1] > 0


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_an_expert_in_less_precision_changes_what_differs_in_that_precision(tmp_path, form):
    family = FAMILIES["bert"]
    base = family.make_base()
    base.save_pretrained(tmp_path / "base")
    expert = family.make_expert(base, 1)
    expert.bert.embeddings.load_state_dict(base.embeddings.state_dict())
    save_as(expert.half(), tmp_path / "red", form)
    plan = make_plan(write_recipe(tmp_path, ["red"]))
    assert not any(t.name.startswith("embeddings") for t in plan.tensors)
    assert sum(t.name.startswith("encoder") for t in plan.tensors) == 32


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_family(folder, "bert", {"red": 2, "green": 3})
    return folder


def test_of_what_experts_change_a_plan_reads_no_more_than_the_first_bytes(small, monkeypatch):
    def refuse(info):
        raise AssertionError(f"{info.path} was read")

    monkeypatch.setattr(tensorfile, "read_bytes", refuse)
    plan = make_plan(small / "recipe.yaml")
    assert not plan.problems and [t.labels for t in plan.tasks] == [
        ("LABEL_0", "LABEL_1"),
        ("LABEL_0", "LABEL_1", "LABEL_2"),
    ]


def test_a_plan_knows_every_tensor_of_the_base_with_its_shape(small):
    plan = make_plan(small / "recipe.yaml")
    state = FAMILIES["bert"].make_base().state_dict()
    assert {t.name: t.shape for t in plan.tensors} == {name: tuple(value.shape) for name, value in state.items()}
    assert {t.name for t in plan.matrices} == {name for name, value in state.items() if value.dim() == 2}


def test_the_figures_of_a_share_of_energy_are_upper_bounds(small, tmp_path):
    recipe = write_recipe(small, ["red", "green"], name="energy.yaml", rank=0.5)
    plan, bundle = make_plan(recipe), Bundle(merge(recipe, tmp_path / "out", workers=1))
    assert not plan.ranks_exact
    assert bundle.counted_bytes <= plan.sizes.counted


def test_the_plan_of_a_static_merge_weighs_what_the_base_weighs(small):
    plan = make_plan(write_recipe(small, ["red", "green"], name="static.yaml", method="tsv_m"))
    assert plan.sizes.factors == plan.sizes.whole == 0 and plan.sizes.counted - plan.sizes.rest == plan.sizes.base


def test_a_long_recipe_is_part_of_the_budget(small):
    few, many = make_plan(small / "recipe.yaml"), small / "many.yaml"
    names = [f"a label with a long name, number {i}" for i in range(3)]
    text = (small / "recipe.yaml").read_text().replace("expert: green", f"expert: green\n  labels: {json.dumps(names)}")
    many.write_text(text)
    assert make_plan(many).sizes.rest >= few.sizes.rest + 100


def test_a_plan_as_data_survives_json(small):
    data = make_plan(small / "recipe.yaml").to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["sizes"]["ratio"] <= 2.0 and data["tasks"][1]["name"] == "green"


def test_all_problems_are_told_at_once(small):
    FAMILIES["bert"].make_expert(FAMILIES["bert"].make_base(), 9).save_pretrained(small / "spoiled")
    (small / "spoiled" / "model.safetensors").write_bytes(b"\0" * 20)
    base = FAMILIES["bert"].make_base(hidden_size=16)
    write_shifted(small / "narrow", "bert", base, {})
    recipe = write_recipe(small, ["red", "missing", "spoiled", "narrow"], name="bad.yaml", rank=1000)
    where = [problem.where for problem in make_plan(recipe).errors]
    assert where == ["task missing", "task spoiled (spoiled)", "task narrow (narrow)", "rank"]


def test_a_plan_without_a_base_tells_what_is_wrong_with_the_experts_too(small):
    recipe = write_recipe(small, ["red", "missing"], base="nowhere", name="nobase.yaml")
    with pytest.raises(InputError, match=r"task missing: .*\n.*base: nowhere: no such"):
        make_plan(recipe)


def test_a_budget_that_cannot_be_held_is_a_warning_that_says_by_how_much(small):
    plan = make_plan(write_recipe(small, ["red", "green"], name="tight.yaml", budget=1.01))
    (problem,) = plan.problems
    assert (
        problem.level == "warning"
        and "is too small" in problem.message
        and f"{plan.sizes.ratio:.2f}" in problem.message
    )


def test_shared_labels_must_be_labels_of_tasks(small):
    recipe = small / "shared.yaml"
    recipe.write_text((small / "recipe.yaml").read_text() + "shared_labels: [[red/LABEL_0, green/LABEL_7]]\n")
    (problem,) = make_plan(recipe).errors
    assert str(problem) == "shared_labels: 'green/LABEL_7' is not a label of any task; write task/label."


def test_figures_speak_of_the_tasks_that_could_be_opened_alone(small):
    one = make_plan(write_recipe(small, ["red"], name="one.yaml", rank="1/T"))
    two = make_plan(write_recipe(small, ["red", "missing"], name="two.yaml", rank="1/T"))
    assert two.left_out == ("missing",) and [t.name for t in two.tasks] == ["red"]
    assert [t.ranks for t in two.tensors] == [t.ranks for t in one.tensors] and two.sizes.factors == one.sizes.factors


def test_a_task_whose_head_alone_is_wrong_is_not_called_left_out(small):
    recipe = small / "labels.yaml"
    recipe.write_text((small / "recipe.yaml").read_text().replace("expert: green", "expert: green\n  labels: [one]"))
    plan = make_plan(recipe)
    assert "has 1 labels, but its head has 3 outputs. Give one label for each output, in order." in str(plan.errors[0])
    assert plan.left_out == () and len(plan.tasks) == 2
    assert "leave out" not in run("plan", recipe).stderr


def test_tasks_that_are_left_out_are_named(small):
    recipe = write_recipe(small, ["red", "missing", "gone"], name="named.yaml")
    result = run("plan", recipe)
    assert result.stdout.startswith("1 task on base (BertModel)")
    assert "the figures above leave out missing, gone, which could not be opened" in result.stderr


def test_a_plan_of_no_task_shows_no_empty_tables(small):
    result = run("plan", write_recipe(small, ["missing", "gone"], name="none.yaml"))
    assert result.stdout == "none of 2 tasks on base (BertModel) could be opened\n"
    assert "leave out" not in result.stderr


def test_a_plan_of_experts_that_change_nothing_has_no_table_of_matrices(small):
    shutil.copytree(small / "base", small / "same", dirs_exist_ok=True)
    output = run("plan", write_recipe(small, ["same"], name="same.yaml"), "--tensors").stdout
    assert "matrices" not in output and "tensor " not in output


def test_two_full_experts_are_said_to_save_no_space_and_four_are_not(twenty):
    def summary(count):
        tasks = [f"task{i}" for i in range(count)]
        return run("plan", write_recipe(twenty, tasks, name=f"{count}apart.yaml")).stdout.splitlines()[-2:]

    first, second = summary(2)
    assert first.startswith("2.00 times the base, the experts as they are 2.00 times;")
    assert second.startswith("This saves no space.")
    assert "times the base, the experts as they are 4.00 times;" in summary(4)[1]


def test_adapters_as_they_are_weigh_the_base_and_what_is_in_them(tmp_path):
    write_family(tmp_path, "bert", {"red": 2})
    options = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    write_adapter(tmp_path, "lora", FAMILIES["bert"].expert, **options)
    plan = make_plan(write_recipe(tmp_path, ["red", "lora"]))
    full, adapter = (task.apart_bytes for task in plan.tasks)
    assert full == plan.sizes.base
    assert adapter == 2 * (4 * 32 + 32 * 4) * 4  # two layers
    assert plan.apart == 2 * plan.sizes.base + adapter


def test_planning_adapters_prints_nothing(tmp_path, caplog, monkeypatch):
    write_family(tmp_path, "bert", {"red": 2})
    write_adapter(tmp_path, "lora", FAMILIES["bert"].expert, target_modules=["query"], task_type="SEQ_CLS")
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")  # as a user's program has it; the command is silent anyway
    make_plan(write_recipe(tmp_path, ["lora"]))
    assert not caplog.records


def test_a_plan_of_many_adapters_builds_as_many_skeletons_as_one_of_few(tmp_path, monkeypatch):
    write_decoder(tmp_path)
    for i in range(6):
        write_adapter(
            tmp_path, f"task{i}", tf.LlamaForCausalLM, seed=i, target_modules=["q_proj"], task_type="CAUSAL_LM"
        )
    counts = []
    for tasks in (2, 6):
        built = []
        monkeypatch.setattr(skeleton, "_SHAPES", {})
        monkeypatch.setattr(skeleton, "empty_model", lambda *a, built=built: built.append(a) or empty_model(*a))
        make_plan(write_recipe(tmp_path, [f"task{i}" for i in range(tasks)]))
        counts.append(len(built))
    assert counts[0] == counts[1] > 0


def test_an_output_layer_of_its_own_leaves_the_shared_skeleton_as_it_was():
    config = FAMILIES["llama"].make_config(tie_word_embeddings=True)
    shared = skeleton.shape_of(config, "LlamaForCausalLM")
    own = skeleton.with_own_output(shared)
    assert "lm_head.weight" in own.slots and "lm_head.weight" not in shared.slots
    assert skeleton.shape_of(config, "LlamaForCausalLM") is shared
    assert "lm_head.weight" not in skeleton.Skeleton(shared.model).slots


def test_the_time_of_a_static_merge_counts_how_often_numbers_are_read_and_no_factoring():
    big = TensorPlan("w", "linear", (8192, 8192), "float32", (8192, 8192), (8192, 8192))
    sizes = Sizes(10**9, 0, 0, 0, 0, 0)
    once, four = (entrywise_seconds([big], sizes, looks, 1) for looks in (0, 3))
    assert once < 0.1 * merge_seconds([big], {"w": (8192, 8192)}, sizes, 1)
    assert four - once == pytest.approx(3 * 2 * 8192 * 8192 * ENTRY_SECONDS, abs=0.1)


def test_a_plan_knows_by_its_method_how_long_it_takes(twenty):
    tasks = [f"task{i}" for i in range(20)]
    ours, read = (make_plan(write_recipe(twenty, tasks, name=f"{m}.yaml", method=m)) for m in ("mass", "average"))
    assert read.seconds < ours.seconds


def test_the_time_of_adapters_grows_with_their_rank_and_not_with_the_matrix():
    big = TensorPlan("w", "linear", (8192, 8192), "float32", (8192, 8192), (16, 16))
    sizes = Sizes(1, 1, 1, 1, 1, 1)
    thin = merge_seconds([big], {"w": (16, 16)}, sizes, 1)
    full = merge_seconds([big], {"w": (8192, 8192)}, sizes, 1)
    assert full > 100 and thin < 1


def test_the_memory_of_adapters_has_no_dense_delta():
    big = TensorPlan("w", "linear", (8192, 8192), "float32", (8192, 8192), (16, 16))
    thin, full = (peak_memory([big], [], {"w": limits}, 1) for limits in ((16, 16), (16, 8192)))
    assert full - thin > 8192 * 8192 * 16
