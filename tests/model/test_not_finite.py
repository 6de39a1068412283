"""Where an output is no number there is no answer, and a merge that would give such outputs is refused."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import massmerge
from massmerge import InputError, MassError
from massmerge.cli.demo.example import make_writing_example
from massmerge.cli.main import main
from models import write_family
from problem_types import TEXTS, answer, change_tensors, overflowing, write_example
from serving import serving


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_output_that_is_not_finite_is_an_error_and_no_label(value):
    found = answer([1.0, value], "single_label_classification")
    assert (found.task, found.label, found.score) == (None, None, None)
    assert "t gives NaN or infinity for this input" in found.error


@pytest.fixture(scope="module")
def broken(root):
    """A bundle whose task `topic` overflows."""
    folder = root / "broken"
    recipe = write_example(folder)
    change_tensors(folder / "topic", overflowing)
    return massmerge.merge(recipe, folder / "bundle")


def test_python_raises_or_gives_the_error_in_the_row(broken):
    model = massmerge.load(broken)
    with pytest.raises(MassError, match="topic gives NaN or infinity"):
        model.predict(TEXTS, task="topic")
    rows = model.predict(TEXTS, task="topic", on_error="row")
    assert all(p.task is None and p.label is None and "NaN or infinity" in p.error for p in rows)
    assert all(p.error is None for p in model.predict(TEXTS, task="mood"))


def test_the_command_writes_the_error_and_exits_with_1(broken):
    done = CliRunner().invoke(main, ["predict", str(broken), TEXTS[0], "--task", "topic", "--json"])
    assert done.exit_code == 1 and "NaN or infinity" in json.loads(done.stdout.splitlines()[0])["error"]
    assert "NaN" not in done.stdout.replace("NaN or infinity", "")


def test_the_service_answers_the_others_of_a_batch(broken):
    with serving(broken) as running:
        bad = running.predict(TEXTS, task="topic").json()["predictions"]
        assert {one["error"]["code"] for one in bad} == {"unanswerable"} and {one["label"] for one in bad} == {None}
        good = running.predict(TEXTS, task="mood").json()["predictions"]
        assert all(one["error"] is None and one["label"] for one in good)


@pytest.mark.parametrize("method", ["mass", "average"])
def test_an_expert_scaled_beyond_float32_is_refused_at_merge_by_name(tmp_path, method):
    recipe = write_family(tmp_path, "bert", {"a": 2, "b": 2}, method=method)
    change_tensors(tmp_path / "b", lambda state: [t.mul_(1e38) for n, t in state.items() if "query.weight" in n])
    with pytest.raises(
        InputError, match=r"task b \(b\): encoder\.layer\.\d\.attention\.self\.query\.weight holds numbers"
    ):
        massmerge.merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_product_that_overflows_is_refused_at_merge(tmp_path):
    recipe = write_example(tmp_path)
    path = tmp_path / "mood" / "adapter_model.safetensors"
    large = {name: tensor * (1e19 if "lora" in name else 1) for name, tensor in load_file(path).items()}
    save_file(large, path)
    with pytest.raises(InputError, match="the delta of mood is too large for float32"):
        massmerge.merge(recipe, tmp_path / "out")


def test_a_text_that_was_computed_from_nan_is_an_error(tmp_path):
    recipe = make_writing_example(tmp_path)
    layer = "decoder.block.0.layer.2"
    # Each is small enough to be merged; their product is not finite.
    scales = {f"{layer}.layer_norm": 1e18, f"{layer}.DenseReluDense.wi": 1e10, f"{layer}.DenseReluDense.wo": 1e12}
    change_tensors(tmp_path / "question", lambda state: [state[f"{n}.weight"].mul_(s) for n, s in scales.items()])
    model = massmerge.load(massmerge.merge(recipe, tmp_path / "bundle"))
    rows = model.generate(TEXTS[:2], task="question", on_error="row", max_new_tokens=3)
    assert all(one.text is None and one.task is None and "NaN or infinity" in one.error for one in rows)
    with pytest.raises(MassError, match="NaN or infinity"):
        model.generate(TEXTS[:2], task="question", max_new_tokens=3)
    assert all(one.error is None and one.tokens for one in model.generate(TEXTS[:2], task="summary", max_new_tokens=3))
