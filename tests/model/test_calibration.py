"""`mass calibrate`: routers fitted on a few inputs, kept in the bundle, chosen from then on."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import massmerge
from answers import vit_images
from massmerge import InputError
from massmerge.bundle.reader import Bundle
from massmerge.cli.main import main
from massmerge.merging.verify import verify_bundle
from massmerge.model.calibrate import calibrate
from massmerge.model.route.bases import SiteBases
from massmerge.model.route.voters import site_router
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import PrototypeRouter
from models import FAMILIES, contents, family_bundle, image_bundle, rows_of, text_bundle, with_options

INPUTS = {
    "spam": ["win a free prize now", "free call win win", "call now prize"],
    "topic": ["the team won the match", "vote law party", "cell gene star"],
    "mood": ["so sad and bad", "happy happy good", "a bad sad song"],
}


@pytest.fixture
def bundle(root, tmp_path):
    """A bundle of its own that may be changed."""
    shutil.copytree(text_bundle(root), tmp_path / "bundle")
    return tmp_path / "bundle"


def run(*arguments):
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["prototype", "linear", "nearest", "mlp"])
def test_a_fitted_router_is_the_bundle_s_from_then_on(bundle, kind):
    assert calibrate(bundle, INPUTS, kind=kind).inputs == {"spam": 3, "topic": 3, "mood": 3}
    assert Bundle(bundle).router_kind == kind
    assert found_tasks(massmerge.load(bundle)) == found_tasks(massmerge.load(bundle, router=kind))
    if kind != "prototype":  # which counts together with these experts' random subspaces
        assert found_tasks(massmerge.load(bundle)) == ["spam"] * 3 + ["topic"] * 3 + ["mood"] * 3


def found_tasks(model):
    return [r.selected[0] for r in model.route(INPUTS["spam"] + INPUTS["topic"] + INPUTS["mood"])]


def test_prototypes_find_more_tasks_than_subspaces_alone(bundle):
    calibrate(bundle, INPUTS, kind="prototype")
    truth = ["spam"] * 3 + ["topic"] * 3 + ["mood"] * 3
    right = {
        kind: sum(a == b for a, b in zip(found_tasks(massmerge.load(bundle, router=kind)), truth, strict=True))
        for kind in ("projection", "prototype")
    }
    assert right["prototype"] > right["projection"]


@pytest.mark.parametrize("kind", ["prototype", "linear", "nearest", "mlp"])
def test_a_bundle_with_a_fitted_router_verifies(bundle, kind):
    calibrate(bundle, INPUTS, kind=kind)
    assert verify_bundle(bundle).ok


def test_a_damaged_router_is_found(bundle):
    calibrate(bundle, INPUTS)
    path = bundle / "router.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert any("router.safetensors" in fault for fault in verify_bundle(bundle).damage)
    with pytest.raises(InputError, match=r"(?s)damaged:.*router\.safetensors"):
        massmerge.load(bundle, check=True)


def test_any_fitted_router_can_be_chosen_when_loading(bundle):
    for kind in ("prototype", "nearest"):
        calibrate(bundle, INPUTS, kind=kind)
    residuals = {
        kind: massmerge.load(bundle, router=kind).route("win")[0].residuals
        for kind in ("projection", "prototype", "nearest")
    }
    assert massmerge.load(bundle).route("win")[0].residuals == residuals["nearest"]
    assert len({json.dumps(r) for r in residuals.values()}) == 3


def test_the_recipe_can_choose_a_router_that_is_fitted_later(root, tmp_path):
    bundle = with_options(text_bundle(root), tmp_path / "bundle", router={"kind": "nearest"})
    with pytest.raises(InputError, match=r"the router nearest has not been fitted for A0\.mean, A1\.mean.*calibrate"):
        massmerge.load(bundle)
    calibrate(bundle, INPUTS, kind="nearest")
    assert massmerge.load(bundle).predict("win")[0].task


def test_a_router_that_was_not_fitted_is_refused_with_what_fits_it(bundle):
    with pytest.raises(InputError, match=r"the router mlp has not been fitted.*`mass calibrate .*` fits it"):
        massmerge.load(bundle, router="mlp")


def test_a_router_that_does_not_exist_is_refused_with_those_there_are(bundle):
    known = r"no router 'oracle'\. Choose from projection, prototype, linear, nearest, mlp, tuned and adapted"
    with pytest.raises(InputError, match=known):
        massmerge.load(bundle, router="oracle")


def test_fitting_again_replaces_the_router_of_that_kind_alone(bundle):
    calibrate(bundle, INPUTS, kind="nearest")
    calibrate(bundle, INPUTS, kind="prototype")
    before = load_file(bundle / "router.safetensors")
    calibrate(bundle, {task: texts[:1] for task, texts in INPUTS.items()}, kind="prototype")
    after = load_file(bundle / "router.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == name.startswith("nearest.")


def test_the_same_inputs_give_the_same_bytes(bundle):
    calibrate(bundle, INPUTS, kind="mlp")
    first = (bundle / "router.safetensors").read_bytes()
    calibrate(bundle, INPUTS, kind="mlp")
    assert (bundle / "router.safetensors").read_bytes() == first


def test_no_more_inputs_are_read_than_count(bundle):
    taken = []

    def many():
        for text in INPUTS["spam"] * 100:
            taken.append(text)
            yield text

    assert calibrate(bundle, {**INPUTS, "spam": many()}, count=5).inputs["spam"] == 5
    assert len(taken) == 5


def test_a_fitted_router_knows_no_lift(bundle):
    calibrate(bundle, INPUTS)
    routing = massmerge.load(bundle).route("win")[0]
    assert routing.lift is None
    assert 0 <= routing.agreement <= 1


def test_a_fitted_router_can_find_an_input_unknown_by_agreement(bundle):
    calibrate(bundle, INPUTS, kind="prototype")  # which has a vote for each voter
    model = massmerge.load(bundle)
    agreement = model.route("gene law film")[0].agreement
    assert model.predict("gene law film", unknown={"agreement": min(1.0, agreement + 0.01)})[0].task is None


def test_image_tasks_are_calibrated_on_ready_images(root, tmp_path):
    shutil.copytree(image_bundle(root), tmp_path / "bundle")
    images = [row["pixel_values"] for row in rows_of(FAMILIES["vit"].make_inputs(4))]
    calibrate(tmp_path / "bundle", {"a": images[:2], "b": images[2:]}, kind="nearest")
    found = massmerge.load(tmp_path / "bundle").route(images)
    assert [r.selected for r in found] == [["a"], ["a"], ["b"], ["b"]]


@pytest.fixture
def calibrated_vit(load_vit):
    """A function that fits a router on images and loads a bundle of three image tasks with it."""
    images = vit_images(load_vit(), 12)
    inputs = {task: images[4 * i : 4 * i + 4] for i, task in enumerate("abc")}

    def load(kind="prototype", **router):
        path = load_vit(**router).sets.bundle
        calibrate(path, inputs, kind=kind)
        return massmerge.load(path)

    return load


def test_unclear_images_get_a_closer_look_by_prototypes_too(calibrated_vit, load_vit):
    everywhere = [site.name for site in load_vit().sites if site.name[0] == "O"]
    model, deep = calibrated_vit(unsure=1e9), calibrated_vit(site=everywhere)
    images = vit_images(model)
    assert model.stages.second is not None
    for found, expected in zip(model.route(images), deep.route(images), strict=True):
        assert found.residuals == pytest.approx(expected.residuals, abs=1e-3)
        assert found.site == expected.site


def test_prototypes_that_were_fitted_for_the_first_blocks_alone_have_no_closer_look(calibrated_vit):
    model = calibrated_vit()
    path = model.sets.bundle / "router.safetensors"
    known = tuple(f"prototype.{voter}." for voter in model.voters)
    fitted = {name: tensor for name, tensor in load_file(path).items() if name.startswith(known)}
    assert 0 < len(fitted) < len(load_file(path))
    save_file(fitted, path)
    older = massmerge.load(path.parent, check=False)
    assert older.stages.second is None
    assert all(p.task for p in older.predict(vit_images(model)))


def test_where_subspaces_are_alike_prototypes_count_more():
    z = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    bases, owners = list(torch.eye(6).split(2)), torch.arange(12) % 3
    plain, alike = (
        PrototypeRouter.fit(z, owners, ProjectionRouter(bases, alike=alike))["scales"] for alike in (False, True)
    )
    assert alike.tolist() == pytest.approx((plain * torch.tensor([1, 2 / 0.75])).tolist())


def test_a_site_whose_subspaces_are_alike_is_known_as_such(bundle, monkeypatch):
    model = massmerge.load(bundle)
    site = model.sites[0]
    assert not site_router(SiteBases(model.sets.tensors), site).alike
    shared = torch.eye(site.width)[:4]  # what adapters of one start have: the same directions but for little
    bases = SiteBases(model.sets.tensors)
    monkeypatch.setattr(bases, "rows", lambda task, _: torch.cat([shared, torch.eye(site.width)[[4 + task]]]))
    assert site_router(bases, site).alike


@pytest.mark.parametrize("kind", ["nearest", "mlp"])
def test_routers_that_know_inputs_only_have_no_closer_look(calibrated_vit, kind):
    assert calibrated_vit(kind).stages.second is None


# What is refused


def test_a_task_without_inputs_is_refused_by_name(bundle):
    with pytest.raises(InputError, match=r"no inputs for topic, mood\. Every task needs some"):
        calibrate(bundle, {"spam": ["win"], "mood": []})


def test_inputs_of_an_unknown_task_are_refused_with_those_there_are(bundle):
    with pytest.raises(InputError, match=r"no task 'weather'\. Choose from spam, topic, mood"):
        calibrate(bundle, {**INPUTS, "weather": ["rain"]})


def test_an_input_that_cannot_be_read_is_refused_with_its_task(bundle):
    with pytest.raises(InputError, match=r"inputs of mood: empty text"):
        calibrate(bundle, {**INPUTS, "mood": ["good", ""]})


def test_a_refused_calibration_changes_nothing(bundle):
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    with pytest.raises(InputError):
        calibrate(bundle, {"spam": ["win"]})
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before


# The verb


@pytest.fixture
def files(tmp_path):
    for task, texts in INPUTS.items():
        (tmp_path / f"{task}.txt").write_text("\n".join(texts))
    return [f"--inputs={task}={tmp_path / task}.txt" for task in INPUTS]


def test_the_verb_fits_on_files_and_says_what_it_used(bundle, files):
    done = run(bundle, *files, "--kind", "nearest")
    assert done.exit_code == 0, done.output
    assert "now routes by nearest, fitted on spam 3, topic 3, mood 3 inputs" in done.output
    assert Bundle(bundle).router_kind == "nearest"


def test_the_verb_speaks_json(bundle, files):
    done = run(bundle, *files, "--json", "--count", "2")
    found = json.loads(done.output)
    assert found["inputs"] == {"spam": 2, "topic": 2, "mood": 2}
    assert found["kind"] in found["tried"]
    assert set(found["after"]["tasks"]) == set(found["before"]["tasks"]) == set(INPUTS)
    assert set(found["tried"]) == {"prototype", "linear"}


def test_several_files_of_a_task_are_read_one_after_the_other(bundle, files, tmp_path):
    (tmp_path / "more.txt").write_text("prize\nwin\n")
    done = run(bundle, *files, f"--inputs=spam={tmp_path / 'more.txt'}", "--json")
    assert json.loads(done.output)["inputs"]["spam"] == 5


def test_tables_are_read_by_column(bundle, files, tmp_path):
    (tmp_path / "spam.csv").write_text("text\nwin\nfree prize\n")
    done = run(bundle, f"--inputs=spam={tmp_path / 'spam.csv'}", *files[1:], "--column", "text", "--json")
    assert json.loads(done.output)["inputs"]["spam"] == 2


def test_a_missing_task_is_an_error_of_the_call(bundle, files):
    done = run(bundle, *files[:2])
    assert done.exit_code == 2
    assert "no inputs for mood" in done.output


def test_a_missing_file_is_an_error_of_the_call(bundle, files, tmp_path):
    done = run(bundle, *files[:2], f"--inputs=mood={tmp_path / 'gone.txt'}")
    assert done.exit_code == 2
    assert "gone.txt: no such file" in done.output


@pytest.mark.parametrize("path", ["nofolder", "-", "word " * 1000])
def test_a_path_that_is_not_there_is_no_text_to_fit_on(bundle, files, path):
    before = contents(bundle)
    done = run(bundle, f"--inputs=spam={path}", *files[1:])
    assert done.exit_code == 2
    assert f"inputs of spam: {path}: no such file or folder." in done.output
    assert contents(bundle) == before


def test_inputs_without_a_path_are_an_error_of_the_call(bundle, files):
    done = run(bundle, "--inputs=spam=", *files[1:])
    assert done.exit_code == 2
    assert "'spam=': the path is missing; write --inputs task=path." in done.output


def test_inputs_without_a_task_are_an_error_of_the_call(bundle):
    done = run(bundle, "--inputs=spam.txt")
    assert done.exit_code == 2
    assert "write --inputs task=path" in done.output


def test_another_family_is_calibrated_at_its_own_sites(root, tmp_path):
    shutil.copytree(family_bundle(root, "gpt2"), tmp_path / "bundle")
    rows = rows_of(FAMILIES["gpt2"].make_inputs(3))
    calibrate(tmp_path / "bundle", dict(zip("abc", ([row] for row in rows), strict=True)), kind="nearest")
    assert [r.selected for r in massmerge.load(tmp_path / "bundle").route(rows)] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("count", [3, 4])
def test_a_second_look_goes_without_what_half_of_four_tasks_share(count):
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(24, 13)).Q.mT
    own = rows[1:].split(3)[:count]
    bases = [torch.cat([rows[:1], v]) if i < 3 else v for i, v in enumerate(own)]
    held = SimpleNamespace(tensors=SimpleNamespace(targets=[*range(count)]), common=lambda tasks, site: bases)
    first, second = (site_router(held, None, second=second) for second in (False, True))
    assert [len(v) for v in first.bases] == [len(v) for v in bases]
    assert [len(v) for v in second.bases] == [3 if count == 4 else len(v) for v in bases]
    assert not second.alike
