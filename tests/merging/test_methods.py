"""The static merges: each against its naive twin as `merge` writes it, and its published special cases."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import naive
import naive_methods
from massmerge import InputError, merge
from massmerge.checkpoints.stores import SafetensorsStore
from massmerge.io.tensor_file import read_tensor
from massmerge.merging.run import Silent
from massmerge.merging.static import Deltas, Known, spans
from massmerge.merging.static.consensus import consensus
from massmerge.merging.static.dare import dare, kept_entries
from massmerge.merging.static.isotropic import iso_c, iso_cts
from massmerge.merging.static.scales import candidates, published_scale
from massmerge.merging.static.spans import Spans
from massmerge.merging.static.ties import ROUNDS, ties
from models import FAMILIES, contents, read_deltas, write_family, write_recipe, write_shifted

TASKS = {"red": 2, "green": 3, "blue": 2}
KEEPING = ["tsv_c", "emr"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", TASKS)
    return folder


@pytest.fixture(scope="module")
def read(family) -> tuple[dict, dict]:
    """The base, and the deltas of every task."""
    base, deltas = read_deltas(family, "bert", list(TASKS))
    floating = [name for name, value in base.items() if value.is_floating_point()]
    return base, {task: {name: state[name] for name in floating} for task, state in deltas.items()}


def run(family: Path, out: Path, tasks=tuple(TASKS), workers: int = 2, **options) -> Path:
    return merge(write_recipe(family, list(tasks), name=f"{out.name}.yaml", **options), out, workers=workers)


def changes(folder: Path, base: dict) -> dict[str, torch.Tensor]:
    """What a checkpoint changed, read by transformers alone."""
    merged = AutoModel.from_pretrained(folder).state_dict()
    assert merged.keys() == base.keys()
    return {name: merged[name] - base[name] for name in base if base[name].is_floating_point()}


def assert_close(got: dict, want: dict, tolerance: float = 1e-3) -> None:
    assert got.keys() == want.keys()
    errors = {name: naive.relative_error(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < tolerance, f"{worst} is off by {errors[worst]}"


TWINS = {
    "average": ({}, naive_methods.average),
    "task_arithmetic": ({"scale": 0.4}, lambda d: naive_methods.scaled(naive_methods.total(d), 0.4)),
    "ties": ({"keep": 0.15, "scale": 0.7}, lambda d: naive_methods.scaled(naive_methods.ties(d, 0.15, "mean"), 0.7)),
    "ties, summed": (
        {"keep": 0.5, "combine": "sum", "scale": 1.0}, lambda d: naive_methods.ties(d, 0.5, "sum"),
    ),
    "consensus": (
        {"threshold": 0.4, "least": 2, "scale": 0.5},
        lambda d: naive_methods.scaled(naive_methods.consensus(d, 0.4, 2), 0.5),
    ),
    "iso_c": ({"scale": 1.3}, lambda d: naive_methods.iso_c(d, 1.3)),
    "iso_cts": ({"scale": 0.9, "common": 0.6}, lambda d: naive_methods.iso_cts(d, 0.6, 0.9)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_a_method_writes_what_its_naive_twin_computes(family, read, tmp_path, name):
    options, twin = TWINS[name]
    out = run(family, tmp_path / "out", method=name.partition(",")[0], **options)
    assert_close(changes(out, read[0]), twin(read[1]))


@pytest.mark.parametrize(("method", "twin"), [("tsv_c", naive_methods.tsv_c), ("emr", naive_methods.emr)])
def test_a_method_that_keeps_the_tasks_writes_what_its_naive_twin_computes_for_each(
    family, read, tmp_path, method, twin
):
    out = run(family, tmp_path / "out", method=method)
    for task in TASKS:
        assert_close(changes(out / task, read[0]), twin(read[1], task))


def test_dare_drops_about_the_share_it_says_and_scales_up_the_rest(family, read, tmp_path):
    out = changes(run(family, tmp_path / "out", ["red"], method="dare", drop=0.7, scale=1.0), read[0])
    delta = naive_methods.flatten(read[1]["red"])
    found = naive_methods.flatten(out)
    kept = found.abs() > 1e-12
    share = 1 - float(kept.double().mean())
    assert share == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / len(delta)))
    assert naive.relative_error(found[kept] * 0.3, delta[kept]) < 1e-3


# Special cases


def family_of(count: int, rows: int = 12, columns: int = 9) -> dict[str, torch.Tensor]:
    torch.manual_seed(count)
    return {f"task{i}": torch.randn(rows, columns) for i in range(count)}


def trimmed(deltas: dict[str, torch.Tensor], keep: float, combine: str = "mean") -> torch.Tensor:
    """TIES of one tensor alone."""
    given = Deltas.of("w", deltas)
    known = Known(tuple(deltas), given.read(next(iter(deltas))).numel(), {"keep": keep})
    for step in ROUNDS:
        known.found.update(step.conclude(step.look(given, known), known))
    found = known.found
    return ties(given, thresholds=found["thresholds"], majority=found["majority"], combine=combine)


def test_ties_with_everything_kept_and_one_task_is_that_task():
    deltas = family_of(1)
    assert torch.equal(trimmed(deltas, 1.0), deltas["task0"])


@pytest.mark.parametrize("keep", [0.001, 0.07, 0.2, 0.5, 0.93, 1.0])
def test_the_entries_that_ties_keeps_are_the_largest_and_as_many_as_it_says(keep):
    delta = family_of(1, 40, 50)["task0"]
    wanted = max(1, int(keep * delta.numel()))
    found = trimmed({"task0": delta}, keep)
    assert int((found != 0).sum()) == wanted
    assert set(found[found != 0].tolist()) == set(delta.flatten()[delta.abs().flatten().topk(wanted).indices].tolist())


def test_entries_of_equal_size_at_the_limit_are_all_kept_and_zeros_never_count():
    delta = torch.tensor([3.0, -2.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert trimmed({"a": delta}, 0.2).tolist() == [3.0, -2.0, 2.0, 0, 0, 0, 0, 0, 0, 0]
    assert trimmed({"a": delta}, 0.9).tolist() == delta.tolist()


def test_an_entry_whose_sum_is_zero_takes_the_sign_of_the_majority():
    one, other = torch.tensor([1.0, 1.0, 1.0, -5.0]), torch.tensor([-1.0, 1.0, 1.0, -5.0])
    assert trimmed({"a": one, "b": other}, 1.0).tolist() == [1.0, 1.0, 1.0, -5.0]
    assert trimmed({"a": -one, "b": -other}, 1.0).tolist() == [-1.0, -1.0, -1.0, 5.0]


def test_the_trim_and_the_majority_are_those_of_all_tensors_together(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    large, small = "encoder.layer.0.output.dense.weight", "encoder.layer.1.output.dense.weight"
    write_shifted(tmp_path / "one", "bert", base, {large: torch.ones(32, 64), small: torch.full((32, 64), 0.01)})
    entries = sum(p.numel() for p in base.parameters())
    keep = 2048 / entries + 1e-9
    out = changes(run(tmp_path, tmp_path / "out", ["one"], method="ties", keep=keep, scale=1.0), base.state_dict())
    assert torch.allclose(out[large], torch.ones(32, 64), atol=1e-6) and not out[small].any()


def test_dare_without_dropping_is_task_arithmetic(family, tmp_path):
    first = run(family, tmp_path / "dare", method="dare", drop=0.0, scale=0.3)
    second = run(family, tmp_path / "sum", method="task_arithmetic", scale=0.3)
    one, other = (load_file(out / "model.safetensors") for out in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_what_dare_drops_depends_on_seed_task_and_tensor_only():
    deltas = family_of(3)
    turned = dict(reversed(deltas.items()))
    one, other = (dare(Deltas.of("w", given), drop=0.5, seed=1) for given in (deltas, turned))
    assert torch.allclose(one, other, atol=1e-6)
    masks = [
        kept_entries((30, 30), 0.5, *about) for about in [(1, "a", "w"), (2, "a", "w"), (1, "b", "w"), (1, "a", "v")]
    ]
    assert all(0.3 < float((masks[0] == mask).double().mean()) < 0.7 for mask in masks[1:])
    assert torch.equal(masks[0], kept_entries((30, 30), 0.5, 1, "a", "w"))


def test_task_arithmetic_with_the_scale_of_one_task_among_all_is_the_average(family, read, tmp_path):
    first = changes(run(family, tmp_path / "sum", method="task_arithmetic", scale=1 / 3), read[0])
    assert_close(first, changes(run(family, tmp_path / "mean", method="average"), read[0]), 1e-4)


def test_the_masks_of_consensus_are_those_counted_by_hand():
    # Entries: all agree; one alone; two of three; nobody. λ = 1: |τ_i| > |τ - τ_i|.
    deltas = {
        "a": torch.tensor([1.0, 9.0, 3.0, 0.0]),
        "b": torch.tensor([1.0, 1.0, 3.0, 0.0]),
        "c": torch.tensor([1.0, 1.0, -3.0, 0.0]),
    }
    # Votes with λ = 1: 0 (1 > 2 never), 1 (9 > 2), 2 (3 > 0, 3 > 0, 3 > 6 not), 0.
    assert consensus(Deltas.of("w", deltas), threshold=1.0, least=1).tolist() == [0.0, 11.0, 3.0, 0.0]
    assert consensus(Deltas.of("w", deltas), threshold=1.0, least=2).tolist() == [0.0, 0.0, 3.0, 0.0]
    # With λ = 0.4: 3 (1 > 0.8), 1 (9 > 0.8; 1 > 4 not), 3 (3 > 0, 3 > 0, 3 > 2.4), 0.
    assert consensus(Deltas.of("w", deltas), threshold=0.4, least=3).tolist() == [3.0, 0.0, 3.0, 0.0]


@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (10, 10)])
def test_iso_c_has_equal_singular_values_with_the_sum_of_those_of_the_sum(shape):
    deltas = family_of(3, *shape)
    values = torch.linalg.svdvals(iso_c(Deltas.of("w", deltas)))
    assert torch.allclose(values, torch.linalg.svdvals(sum(deltas.values())).mean(), rtol=1e-4)


def test_iso_c_of_a_sum_of_low_rank_has_equal_values_in_its_directions_and_zero_in_the_others():
    torch.manual_seed(0)
    deltas = {name: torch.randn(30, 2) @ torch.randn(2, 20) for name in "ab"}
    values = torch.linalg.svdvals(iso_c(Deltas.of("w", deltas)))
    assert torch.allclose(values[:4], values[0], rtol=1e-4) and float(values[4:].max()) < 1e-4 * float(values[0])


def test_iso_cts_with_everything_common_is_iso_c():
    given = Deltas.of("w", family_of(3))
    assert torch.equal(iso_cts(given, common=1.0), iso_c(given))


def test_iso_cts_has_equal_singular_values_and_keeps_a_direction_of_each_task():
    deltas = family_of(3, 40, 30)
    values = torch.linalg.svdvals(iso_cts(Deltas.of("w", deltas), common=0.8))
    assert len(values) == 30 and torch.allclose(values, values[0], rtol=1e-3)


def test_emr_of_one_task_is_that_task(family, read, tmp_path):
    out = run(family, tmp_path / "out", ["green"], method="emr")
    assert_close(changes(out / "green", read[0]), read[1]["green"], 1e-4)


def test_tsv_c_at_full_rank_is_the_expert(family, read, tmp_path):
    out = run(family, tmp_path / "out", method="tsv_c", rank=32)
    for task in TASKS:
        assert_close(changes(out / task, read[0]), read[1][task], 1e-3)


# As merges


@pytest.mark.parametrize("method", ["ties", "dare", "emr"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(family, tmp_path, method):
    first, second = (contents(run(family, tmp_path / method / f"w{w}", workers=w, method=method)) for w in (1, 3))
    first = {name: data for name, data in first.items() if not name.endswith(".yaml")}
    assert first == {name: data for name, data in second.items() if not name.endswith(".yaml")}


class Failing(Silent):
    """Stops a merge after some tensors."""

    def __init__(self, after: int) -> None:
        self.left, self.done = after, []

    def start(self, total: int, done: int) -> None:
        self.done.append(done)

    def tensor(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("method", "looks"), [("task_arithmetic", 0), ("ties", 3)])
def test_a_merge_that_was_stopped_goes_on_and_ends_in_the_same_bytes(family, read, tmp_path, method, looks):
    recipe = write_recipe(family, list(TASKS), name=f"stopped-{method}.yaml", method=method)
    count = len(read[1]["red"])
    with pytest.raises(KeyboardInterrupt):
        merge(recipe, tmp_path / "out", workers=1, progress=Failing(looks * count + 10))
    heard = Failing(0)
    merge(recipe, tmp_path / "out", workers=1, progress=heard)
    assert heard.done[-1] >= 9
    assert contents(tmp_path / "out") == contents(merge(recipe, tmp_path / "whole", workers=1))


@pytest.mark.parametrize("method", ["task_arithmetic", "tsv_c"])
def test_heads_and_labels_of_every_task_are_kept(family, tmp_path, method):
    out = run(family, tmp_path / "out", method=method)
    for task, labels in TASKS.items():
        folder = out / task if method == "tsv_c" else out / "heads" / task
        assert len(json.loads((folder / "labels.json").read_text())) == labels
        weight = load_file(folder / "head" / "model.safetensors")["classifier.weight"]
        assert torch.equal(weight, load_file(family / task / "model.safetensors")["classifier.weight"])


def test_the_card_says_which_folder_to_load(family, tmp_path):
    one = run(family, tmp_path / "one", ["red", "blue"], method="average")
    apart = run(family, tmp_path / "apart", ["red", "blue"], method="tsv_c")
    assert 'AutoModel.from_pretrained(".")' in (one / "README.md").read_text()
    assert 'AutoModel.from_pretrained("red")' in (apart / "README.md").read_text()


@pytest.mark.parametrize("method", KEEPING)
def test_the_manifest_says_what_the_compressed_form_weighs(family, read, tmp_path, method):
    out = run(family, tmp_path / "out", method=method)
    base = sum(value.numel() * value.element_size() for value in load_file(family / "base/model.safetensors").values())
    shapes = {name: delta.flatten(1).shape if delta.dim() > 1 else None for name, delta in read[1]["red"].items()}
    if method == "emr":  # one more model, a bit a weight and task, and a scale a tensor and task
        masks = sum(3 * (math.ceil(delta.numel() / 8) + 4) for delta in read[1]["red"].values())
        expected = base + 4 * sum(delta.numel() for delta in read[1]["red"].values()) + masks
    else:
        matrices = {
            n: s for n, s in shapes.items() if s and min(s) >= 3 and naive_methods.is_matrix(n, read[1]["red"][n])
        }
        factors = sum(4 * (min(s) // 3) * (sum(s) + 1) for s in matrices.values())
        whole = sum(4 * delta.numel() for name, delta in read[1]["red"].items() if name not in matrices)
        expected = base + 3 * (factors + whole)
    assert json.loads((out / "mass.json").read_text())["needed_bytes"] == expected


def test_adapters_are_merged_as_the_deltas_they_stand_for(tmp_path):
    from peft import LoraConfig, get_peft_model

    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    deltas = {}
    for seed, task in enumerate(("one", "two")):
        torch.manual_seed(seed)
        expert = FAMILIES["bert"].expert.from_pretrained(tmp_path / "base")
        config = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False, task_type="SEQ_CLS")
        model = get_peft_model(expert, config)
        model.save_pretrained(tmp_path / task)
        inside = model.merge_and_unload().bert.state_dict()
        deltas[task] = {n: inside[n] - v for n, v in base.state_dict().items() if v.is_floating_point() and n in inside}
    for method, twin in (
        ("task_arithmetic", lambda: naive_methods.scaled(naive_methods.total(deltas), 0.3)),
        ("ties", lambda: naive_methods.ties(deltas, 0.01, "mean")),
    ):
        options = {"keep": 0.01, "scale": 1.0} if method == "ties" else {}
        out = changes(run(tmp_path, tmp_path / method, ["one", "two"], method=method, **options), base.state_dict())
        assert_close({name: out[name] for name in deltas["one"]}, twin())


def test_a_published_scale_is_less_the_more_tasks_are_added():
    assert [published_scale("task_arithmetic", count, {}) for count in (2, 8, 14, 20, 33)] == [0.3, 0.3, 0.2, 0.1, 0.1]
    assert published_scale("ties", 8, {"combine": "sum"}) == 0.3
    assert candidates("task_arithmetic", {})[-1] == 1.0 and candidates("iso_c", {})[-1] == 3.0


def test_a_refused_option_writes_nothing(family, tmp_path):
    with pytest.raises(InputError, match=r"11: 'merge.keep': is not an option of dare"):
        run(family, tmp_path / "out", method="dare", keep=0.2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["average", "task_arithmetic", "ties", "consensus"])
def test_a_merge_by_spans_writes_the_bytes_of_one_by_whole_tensors(family, tmp_path, monkeypatch, method):
    with monkeypatch.context() as patched:
        patched.setattr(Spans, "of", classmethod(lambda cls, tensor, originals: None))
        whole = run(family, tmp_path / "whole", method=method)
    monkeypatch.setattr(spans, "_LONGEST", 37)
    monkeypatch.setattr(SafetensorsStore, "read", refused)
    by_span = run(family, tmp_path / "spans", method=method)
    assert (by_span / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def refused(store: SafetensorsStore, name: str) -> torch.Tensor:
    if store.infos[name].dtype.is_floating_point and "classifier" not in name:
        raise AssertionError(f"{name} was read as a whole")
    return read_tensor(store.infos[name])


def test_numbers_that_are_not_finite_are_told_by_spans_too(tmp_path):
    write_family(tmp_path, "bert", TASKS)
    path = tmp_path / "green" / WEIGHTS
    state = load_file(path)
    name = next(name for name in state if name.endswith("layer.0.output.dense.weight"))
    state[name][-1, -1] = float("nan")
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"task green \(green\): encoder\.layer\.0\.output\.dense\.weight holds NaN"):
        run(tmp_path, tmp_path / "out", method="average")
