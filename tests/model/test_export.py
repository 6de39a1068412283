"""`mass export`: what other software makes of an export is what the bundle answers."""

import errno
import json
import os
import sys

import pytest
import torch
import transformers as tf
from click.testing import CliRunner
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from massmerge import Recipe, load, merge
from massmerge.cli.main import main
from massmerge.errors import InputError, MassError
from massmerge.model.export import export_bundle, run
from massmerge.model.export.layout import make_layout
from models import (
    FAMILIES,
    contents,
    dense_changes,
    dense_expert,
    family_bundle,
    with_options,
    write_recipe,
    write_shifted,
)
from naive import tsv_merge

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def bert(root):
    return family_bundle(root, "bert")


@pytest.fixture(scope="module")
def adapters(bert, tmp_path_factory):
    """Adapters of all tasks of the BERT bundle, in each of the three forms."""
    folder = tmp_path_factory.mktemp("adapters")
    return folder, {
        form: export_bundle(bert, folder / form, "peft", ["a", "b"], adapters=form)
        for form in ("together", "alone", "lora")
    }


def plain_model(bundle, adapter, name):
    """The task's class over the bundle's base, as a user of PEFT makes it."""
    return (
        FAMILIES[name]
        .expert.from_pretrained(
            bundle / "base", config=tf.AutoConfig.from_pretrained(adapter), ignore_mismatched_sizes=True
        )
        .eval()
    )


@torch.inference_mode()
def logits(model, name):
    return model(**FAMILIES[name].make_inputs()).logits


def assert_close(found, wanted):
    assert float((found - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max()))


# Adapters


@pytest.mark.parametrize("name", ["bert", "dinov2", "gpt2"])
def test_an_adapter_loaded_by_peft_answers_as_the_dense_twin(root, tmp_path, name):
    bundle = family_bundle(root, name)
    export_bundle(bundle, tmp_path / "out", "peft", ["b"])
    model = PeftModel.from_pretrained(plain_model(bundle, tmp_path / "out" / "b", name), tmp_path / "out" / "b").eval()
    assert_close(logits(model, name), logits(dense_expert(bundle, name, ["b"], "b"), name))


def test_one_model_holds_the_adapters_of_two_tasks_side_by_side(root, tmp_path):
    bundle = family_bundle(root, "clip")
    export_bundle(bundle, tmp_path / "out", "peft", ["a", "b"])
    inputs, base = FAMILIES["clip"].make_inputs(), tf.CLIPVisionModel.from_pretrained(bundle / "base").eval()
    twins = {task: tf.CLIPVisionModel.from_pretrained(bundle / "base").eval() for task in "ab"}
    model = PeftModel.from_pretrained(base, tmp_path / "out" / "a", adapter_name="a").eval()
    model.load_adapter(tmp_path / "out" / "b", adapter_name="b")
    for task, twin in twins.items():
        twin.load_state_dict(dense_changes(bundle, twin, [task], tsv_merge), strict=False)
        model.set_adapter(task)
        with torch.inference_mode():
            assert_close(model(**inputs).last_hidden_state, twin(**inputs).last_hidden_state)


def test_adapters_that_stand_alone_are_smaller_and_answer_the_same(bert, adapters):
    folder, results = adapters
    sizes = {form: result.parts[0].nbytes for form, result in results.items()}
    assert sizes["alone"] < sizes["together"]
    model = PeftModel.from_pretrained(plain_model(bert, folder / "alone" / "a", "bert"), folder / "alone" / "a").eval()
    assert_close(logits(model, "bert"), logits(dense_expert(bert, "bert", ["a"], "a"), "bert"))


def test_what_lora_cannot_hold_is_named_with_its_share_of_the_change(bert, adapters):
    part = adapters[1]["lora"].parts[1]
    base = FAMILIES["bert"].base.from_pretrained(bert / "base").state_dict()
    file = load_file(bert / "tasks" / "b" / "factors.safetensors")
    whole = {name: float((file[name] - base[name]).double().square().sum()) for name in file if name in base}
    low_rank = sum(float(value.double().square().sum()) for name, value in file.items() if name.endswith(".s"))
    total = sum(whole.values()) + low_rank
    del whole["embeddings.token_type_embeddings.weight"]  # kept whole, but LoRA holds a matrix of two rows
    assert set(part.left_out) == set(whole)
    assert sum(part.left_out.values()) == pytest.approx(sum(whole.values()) / total, rel=1e-3)
    assert all(".bias" in name or "LayerNorm" in name for name in whole)


def test_nothing_but_lora_matrices_is_in_an_adapter_for_servers(adapters):
    folder = adapters[0] / "lora" / "a"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["bias"], config["lora_bias"], config["modules_to_save"]) == ("none", False, None)
    assert all(".lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert config["lora_alpha"] == config["r"]
    assert (folder / "head" / "model.safetensors").is_file()


def test_ranks_that_differ_are_told_by_module(root, tmp_path):
    bundle = family_bundle(root, "dinov2")
    export_bundle(bundle, tmp_path / "out", "peft", ["a"], adapters="lora")
    config = json.loads((tmp_path / "out" / "a" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "out" / "a" / "adapter_model.safetensors")
    ranks = {name.split(".lora_A")[0]: len(t) for name, t in tensors.items() if ".lora_A" in name}
    assert config["r"] == max(ranks.values()) and config["rank_pattern"] == config["alpha_pattern"]
    assert len(ranks) == len(config["target_modules"])


@pytest.mark.parametrize("form", ["together", "alone"])
def test_an_adapter_is_read_again_as_an_expert(bert, adapters, tmp_path, form):
    folder = adapters[0] / form
    tasks = [{"name": t, "expert": str(folder / t)} for t in "ab"]
    merge(Recipe.model_validate({"base": str(bert / "base"), "tasks": tasks, "merge": {"rank": 8}}), tmp_path / "again")
    inputs = [{k: v[0] for k, v in FAMILIES["bert"].make_inputs(1).items()}]
    assert load(tmp_path / "again").predict(inputs, task="b")[0].logit == pytest.approx(
        load(bert).predict(inputs, task="b")[0].logit, abs=TOLERANCE
    )


class _Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.mixed = nn.Conv2d(4, 4, 3, groups=2)
        self.plain = nn.Conv2d(4, 4, 3)


def test_what_no_part_of_peft_holds_is_left_out_and_the_rest_is_not():
    layout = make_layout(_Tokens(), ["mixed.weight", "plain.weight"], ["scale", "plain.bias"], [], "together")
    assert (layout.lora, layout.biases, layout.saved, layout.left_out) == ({"plain"}, {"plain"}, {"mixed"}, ["scale"])


def test_a_module_that_peft_takes_for_another_by_its_name_is_saved_too():
    model = nn.ModuleDict({"pre_classifier": nn.Linear(2, 2), "classifier": nn.Linear(2, 2), "body": nn.Linear(2, 2)})
    layout = make_layout(model, ["body.weight", "pre_classifier.weight"], [], ["classifier.weight"], "together")
    assert (layout.lora, layout.saved) == ({"body"}, {"classifier", "pre_classifier"})


# Checkpoints


def test_a_checkpoint_of_one_task_has_its_head_and_answers_as_the_dense_twin(bert, tmp_path):
    part = export_bundle(bert, tmp_path / "out", "hf", ["c"]).parts[0]
    model = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert part.head == "inside" and model.config.num_labels == 4
    assert_close(logits(model, "bert"), logits(dense_expert(bert, "bert", ["c"], "c"), "bert"))


def test_a_checkpoint_of_a_set_is_the_adaptive_merge(bert, tmp_path):
    part = export_bundle(bert, tmp_path / "out", "hf", ["a", "c"]).parts[0]
    model = tf.AutoModel.from_pretrained(tmp_path / "out").eval()
    twin = dense_expert(bert, "bert", ["a", "c"], "a").bert
    inputs = FAMILIES["bert"].make_inputs()
    with torch.inference_mode():
        assert_close(model(**inputs).last_hidden_state, twin(**inputs).last_hidden_state)
    assert (part.name, part.head) == ("a, c", "none")


# ONNX


def test_an_onnx_file_takes_other_numbers_of_inputs_and_tokens(root, tmp_path):
    import onnxruntime

    bundle = family_bundle(root, "distilbert")
    part = export_bundle(bundle, tmp_path / "out", "onnx", ["a"]).parts[0]
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    inputs = {k: v[:, :6] for k, v in FAMILIES["distilbert"].make_inputs(5).items()}
    found = session.run(["logits"], {k: v.numpy() for k, v in inputs.items()})[0]
    with torch.inference_mode():
        wanted = dense_expert(bundle, "distilbert", ["a"], "a")(**inputs).logits
    assert_close(torch.from_numpy(found), wanted)
    assert part.difference < TOLERANCE and (tmp_path / "out" / "labels.json").is_file()


# Wrong calls


def mass(*arguments):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_a_task_that_the_bundle_lacks_is_named_with_those_there_are(bert, tmp_path):
    result = mass(bert, tmp_path / "out", "--to", "peft", "--tasks", "a,zebra")
    assert result.exit_code == 2 and "no task 'zebra'. Choose from a, b, c." in result.output
    assert not (tmp_path / "out").exists()


def test_a_set_must_be_named(bert, tmp_path):
    result = mass(bert, tmp_path / "out", "--to", "hf")
    assert result.exit_code == 2 and "name its tasks by --tasks" in result.output
    assert mass(bert, tmp_path / "out", "--to", "hf", "--tasks", " , ").exit_code == 2


def test_a_task_that_changes_nothing_but_norms_is_told_to_be_a_checkpoint(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    write_shifted(tmp_path / "calm", "bert", base, {"encoder.layer.1.output.LayerNorm.weight": torch.full((32,), 0.1)})
    merge(write_recipe(tmp_path, ["calm"]), tmp_path / "bundle")
    result = mass(tmp_path / "bundle", tmp_path / "out", "--to", "peft")
    assert result.exit_code == 2 and "calm changes no layer that LoRA knows; export it with --to hf." in result.output
    assert not (tmp_path / "out").exists()
    assert mass(tmp_path / "bundle", tmp_path / "out", "--to", "hf").exit_code == 0


def test_what_is_at_the_target_stays(bert, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = mass(bert, tmp_path, "--to", "peft")
    assert result.exit_code == 2 and "is there already" in result.output
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_a_target_below_a_file_is_refused_with_that_file(bert):
    result = mass(bert, "/dev/null/deep/x", "--to", "hf", "--tasks", "a")
    assert result.exit_code == 2
    assert "error: /dev/null/deep/x: cannot be created because /dev/null is not a folder." in result.output


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error")])
def test_a_full_disk_is_said_with_the_target(bert, tmp_path, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setitem(run._OF_SETS, "hf", full)
    result = mass(bert, tmp_path / "out", "--to", "hf", "--tasks", "a")
    assert result.exit_code == 1
    assert f"error: {tmp_path / 'out'}: cannot be written (" in result.output


@pytest.mark.parametrize("adapters", ["together", "lora"])
def test_a_form_of_adapters_is_refused_where_none_are_written(bert, tmp_path, adapters):
    result = mass(bert, tmp_path / "out", "--to", "hf", "--tasks", "a", "--adapters", adapters)
    assert result.exit_code == 2
    assert (
        f"--adapters {adapters} is for --to peft; --to hf writes no adapters. Leave one of them out." in result.output
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("form", "library"), [("peft", "peft"), ("onnx", "onnxruntime")])
def test_a_missing_library_is_named_with_what_installs_it(bert, tmp_path, monkeypatch, form, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"needs {library}: pip install 'massmerge\["):
        export_bundle(bert, tmp_path / "out", form, ["a"])
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_is_merged_anew_for_each_input_is_no_checkpoint(bert, tmp_path):
    weighted = with_options(bert, tmp_path / "bundle", answer={"merge": "weighted"})
    with pytest.raises(InputError, match="merged anew for each input"):
        export_bundle(weighted, tmp_path / "out", "hf", ["a", "b"])


def test_outputs_that_differ_from_the_bundles_leave_nothing_behind(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TOLERANCE", 0.0)
    with pytest.raises(MassError, match="Nothing was written"):
        export_bundle(bert, tmp_path / "out", "hf", ["a", "b"])
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_what_it_wrote_and_what_it_left_out(bert, tmp_path):
    result = mass(bert, tmp_path / "out", "--to", "peft", "--tasks", "a", "--adapters", "lora")
    assert result.exit_code == 0 and "warning: a: left out" in result.output
    assert "dense.bias and" in result.output and "--adapters together includes them" in result.output
    data = json.loads(mass(bert, tmp_path / "again", "--to", "hf", "--tasks", "a", "--json").stdout)
    assert data["parts"][0]["difference"] < TOLERANCE and data["form"] == "hf"
