from pathlib import Path

import pytest
import torch
from PIL import Image

import naive
from massmerge import Bundle, InputError, merge
from massmerge.bundle.inspect import block_of, inspect_bundle, plot_inspection
from massmerge.cli.inspect import describe
from models import FAMILIES, read_deltas, write_recipe, write_shifted

TASKS = ["first", "twin", "other"]


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """Three experts: `twin` changes what `first` changes, `other` changes one matrix alone."""
    folder = tmp_path_factory.mktemp("alike")
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(folder / "base")
    torch.manual_seed(5)
    shift = {key: torch.randn(value.shape) * 0.02 for key, value in base.state_dict().items()}
    write_shifted(folder / "first", "bert", base, shift)
    write_shifted(folder / "twin", "bert", base, {key: 1.5 * value for key, value in shift.items()})
    write_shifted(folder / "other", "bert", base, {"encoder.layer.1.output.dense.weight": torch.randn(32, 64)})
    return folder


@pytest.fixture(scope="module")
def bundle(family) -> Bundle:
    return Bundle(merge(write_recipe(family, TASKS), family / "out", workers=1))


def test_kept_energy_of_a_task_is_that_of_all_its_deltas_together(family, bundle):
    _, deltas = read_deltas(family, "bert", TASKS)
    for i, task in enumerate(inspect_bundle(bundle).tasks):
        kept = sum(float(bundle.factors(task.name, n).s.square().sum()) for n, k in bundle.ranks.items() if k[i])
        assert task.energy == pytest.approx(
            kept / sum(float(deltas[task.name][n].square().sum()) for n in bundle.ranks), abs=1e-4
        )


def test_kept_energy_of_a_block_is_that_of_its_own_deltas(family, bundle):
    _, deltas = read_deltas(family, "bert", TASKS)
    names = [n for n in bundle.ranks if n.startswith("encoder.layer.0.")]
    kept = sum(float(bundle.factors("first", n).s.square().sum()) for n in names)
    expected = kept / sum(float(deltas["first"][n].square().sum()) for n in names)
    assert inspect_bundle(bundle).blocks["encoder.layer.0"][0] == pytest.approx(expected, abs=1e-4)


def test_a_block_that_a_task_leaves_alone_is_kept_wholly(bundle):
    assert inspect_bundle(bundle).blocks["encoder.layer.0"][2] == 1.0


def test_similarity_is_the_cosine_of_all_kept_deltas_together(bundle):
    flat = []
    for i, task in enumerate(TASKS):
        parts = [bundle.factors(task, n).dense() if k[i] else torch.zeros_like(bundle.factors("first", n).dense())
                 for n, k in bundle.ranks.items()]  # fmt: skip
        flat.append(torch.cat([p.flatten() for p in parts]))
    assert torch.dist(torch.tensor(inspect_bundle(bundle).similarity).double(), naive.cosines(flat)) < 1e-3


def test_a_task_is_left_out_where_an_earlier_one_stands_for_it(family, tmp_path):
    recipe = write_recipe(family, TASKS, name="fixed.yaml", router={"first_pass": "fixed"})
    bundle = Bundle(merge(recipe, tmp_path / "out", workers=1))
    first, twin, other = inspect_bundle(bundle).tasks
    assert (first.left_out, other.left_out) == ((), ())
    assert set(twin.left_out) == set(bundle.ranks)


def test_no_task_is_left_out_of_a_fixed_model_that_there_is_not(bundle):
    assert [task.left_out for task in inspect_bundle(bundle).tasks] == [(), (), ()]
    assert "fixed model" not in describe(inspect_bundle(bundle))


def test_sizes_are_those_of_the_files(bundle):
    report = inspect_bundle(bundle)
    total = sum(p.stat().st_size for p in bundle.path.rglob("*") if p.is_file())
    assert sum(report.sizes.values()) == total
    assert report.ratio == pytest.approx((total - report.sizes["heads"]) / report.base_bytes)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("encoder.layer.11.output.dense.weight", "encoder.layer.11"),
        ("h.0.attn.c_attn.weight", "h.0"),
        ("encoder.block.1.layer.0.SelfAttention.q.weight", "encoder.block.1"),
        ("embeddings.word_embeddings.weight", "outside blocks"),
        ("0.weight", "0"),
    ],
)
def test_a_tensor_belongs_to_the_block_that_its_name_counts(name, block):
    assert block_of(name) == block


def test_blocks_stand_in_the_order_of_the_network(bundle):
    assert list(inspect_bundle(bundle).blocks) == ["encoder.layer.0", "encoder.layer.1", "outside blocks"]


def test_a_plot_is_a_picture_of_some_size(bundle, tmp_path):
    plot_inspection(inspect_bundle(bundle), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as picture:
        assert min(picture.size) > 400


def test_a_plot_of_an_unknown_format_is_refused(bundle, tmp_path):
    with pytest.raises(InputError, match=r"plot\.xyz: not a supported plot format\. Use \.png"):
        plot_inspection(inspect_bundle(bundle), tmp_path / "plot.xyz")


def test_overlap_is_the_share_of_the_smaller_routing_subspace_that_lies_in_the_other(tmp_path):
    """Two tasks read the same directions and write them elsewhere: their deltas are orthogonal, and routing is lost."""
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(5)
    shifts = {task: {} for task in ("first", "second", "third")}
    for name, tensor in base.state_dict().items():
        if tensor.ndim == 2 and "encoder" in name:
            v = torch.linalg.qr(torch.randn(tensor.shape[1], 12)).Q.mT
            u = torch.linalg.qr(torch.randn(tensor.shape[0], 12)).Q
            shifts["first"][name] = u[:, :4] @ v[:4]
            shifts["second"][name] = u[:, 4:8] @ v[:4]
            shifts["third"][name] = u[:, 8:] @ torch.cat([v[3:4], v[8:11]])
    for task, shift in shifts.items():
        write_shifted(tmp_path / task, "bert", base, shift)
    recipe = write_recipe(tmp_path, list(shifts), rank=4)
    report = inspect_bundle(Bundle(merge(recipe, tmp_path / "out", workers=1)))
    similarity, overlap = torch.tensor(report.similarity), torch.tensor(report.overlap)
    assert abs(float(similarity[0, 1])) < 0.01
    expected = torch.tensor([[1, 1, 0.25], [1, 1, 0.25], [0.25, 0.25, 1]])
    assert torch.dist(overlap, expected) < 0.02
    assert 0 < report.overlap_by_chance < 0.2
