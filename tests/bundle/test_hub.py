"""Bundles on the hub: the real client against a hub on loopback."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner

import massmerge as mm
from hub import TOKEN, Blob, serving_hub, use_hub
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.cli.main import main
from massmerge.errors import InputError, MassError
from models import family_bundle, text_bundle

NAME = "me/bundle"
FACTORS = "tasks/b/factors.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving_hub() as hub:
        use_hub(monkeypatch, hub, tmp_path / "cache")
        yield hub


@pytest.fixture
def bundle(root, tmp_path):
    """A copy, which may be changed."""
    return shutil.copytree(family_bundle(root, "bert"), tmp_path / "bundle")


def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Push


def test_a_push_puts_exactly_the_files_of_the_bundle_on_the_hub_in_one_commit(hub, bundle):
    (bundle / "notes.txt").write_text("mine")
    done = mm.push(bundle, NAME)
    repo = hub.repositories[NAME]
    held = repo.files()
    held.pop(".gitattributes")
    wanted = files_of(bundle)
    wanted.pop("notes.txt")
    wanted["README.md"] = wanted["README.md"].replace(b'mm.load(".")', b'mm.load("me/bundle")')
    assert held == wanted
    assert len(repo.messages) == 2 and done.commit == repo.branches["main"] and not repo.private


def test_a_repository_is_private_if_asked_for(hub, bundle):
    mm.push(bundle, NAME, private=True)
    assert hub.repositories[NAME].private


def test_a_push_goes_to_a_branch_of_its_own_with_its_message(hub, bundle):
    mm.push(bundle, NAME, revision="trial/1", message="for a look")
    repo = hub.repositories[NAME]
    assert "mass.json" in repo.files("trial/1") and "mass.json" not in repo.files("main")
    assert repo.messages[-1] == "for a look"


def test_a_push_that_was_interrupted_sends_only_what_is_missing_when_repeated(hub, bundle):
    hub.failing.append(("POST /api/models/me/bundle/commit", 503))
    with pytest.raises(MassError, match="Run the same command again"):
        mm.push(bundle, NAME)
    sent = hub.count("PUT /lfs/")
    assert sent >= 4 and "mass.json" not in hub.repositories[NAME].files()
    mm.push(bundle, NAME)
    assert hub.count("PUT /lfs/") == sent and "mass.json" in hub.repositories[NAME].files()


def test_an_upload_that_the_storage_refuses_says_which_file(hub, bundle):
    hub.failing.append(("PUT /lfs/", 403))
    with pytest.raises(MassError, match=r"me/bundle.*uploading '.*' to the Hub.*403"):
        mm.push(bundle, NAME)


def test_a_second_push_removes_the_files_of_the_first_that_are_gone_and_no_others(hub, bundle, tmp_path):
    mm.push(bundle, NAME)
    repo = hub.repositories[NAME]
    repo.commits[repo.branches["main"]]["picture.png"] = Blob(b"added on the hub", lfs=False)
    mm.remove(bundle, "b", out=tmp_path / "less")
    done = mm.push(tmp_path / "less", NAME)
    assert FACTORS in done.removed
    held = repo.files()
    assert not any(name.startswith("tasks/b/") for name in held) and "picture.png" in held
    assert mm.load(NAME).tasks == ["a", "c"]


def test_a_repository_with_another_model_is_left_alone(hub, bundle):
    mm.push(bundle, NAME)
    repo = hub.repositories[NAME]
    repo.commit("main", {"model.safetensors": Blob(b"theirs", lfs=False)}, "another model")
    with pytest.raises(InputError, match=r"me/bundle: holds something that is no bundle:\s+model.safetensors"):
        mm.push(bundle, NAME)
    assert set(repo.files()) == {"model.safetensors"}


def test_a_damaged_bundle_is_not_uploaded(hub, bundle):
    (bundle / "recipe.yaml").write_text("base: other")
    with pytest.raises(InputError, match="damaged, so it is not uploaded"):
        mm.push(bundle, NAME)
    assert not hub.asked


def test_a_bundle_whose_base_lies_on_this_machine_is_not_uploaded(hub, bundle):
    manifest = read_manifest(bundle)
    del manifest["files"]["base/model.safetensors"]
    (bundle / "base" / "model.safetensors").unlink()
    manifest["base"] |= {"location": "/home/me/base", "sha256": "0" * 64, "revision": None}
    sign_manifest(bundle, manifest)
    with pytest.raises(InputError, match=r"reference to /home/me/base.*base: copy"):
        mm.push(bundle, NAME)
    assert not hub.asked


def test_without_a_token_a_push_says_how_to_log_in(hub, bundle, tmp_path, monkeypatch):
    use_hub(monkeypatch, hub, tmp_path / "cache", token=None)
    result = run("push", bundle, NAME)
    assert result.exit_code == 2 and "hf auth login" in result.stderr and "HF_TOKEN" in result.stderr


@pytest.mark.parametrize("said", [f"bad Bearer {TOKEN}", "no such token: hf_" + "a1B2" * 8])
def test_a_token_that_the_hub_sends_back_is_not_shown(hub, bundle, said):
    hub.says = said
    hub.failing.append(("POST /api/repos/create", 403))
    result = run("push", bundle, NAME)
    assert result.exit_code == 2 and "the hub refused" in result.stderr
    assert TOKEN not in result.stderr and "a1B2" not in result.stderr and "…" in result.stderr


def test_a_dry_run_sends_nothing(hub, bundle):
    result = run("push", bundle, NAME, "--dry-run", "--json")
    said = json.loads(result.stdout)
    assert said["files"] == len(read_manifest(bundle)["files"]) + 1 and said["commit"] is None and not hub.asked


@pytest.mark.parametrize("name", ["bundle", "me/bundle@v1", "a/b/c", "../bundle", "me/"])
def test_what_is_no_name_of_a_repository_is_refused(bundle, name):
    with pytest.raises(InputError, match="Write me/name"):
        mm.push(bundle, name)


# Read


def test_a_bundle_on_the_hub_answers_as_the_one_in_its_folder(hub, root):
    here = text_bundle(root)
    mm.push(here, NAME)
    rows = ["a text", "another one"]
    assert [p.logit for p in mm.load(NAME).predict(rows)] == [p.logit for p in mm.load(here).predict(rows)]


@pytest.mark.parametrize("verb", [["predict"], ["explain"], ["inspect"], ["verify"]])
def test_verbs_that_read_take_a_name_on_the_hub(hub, root, verb):
    hub.hold(NAME, text_bundle(root))
    inputs = ["a text"] if verb[0] in ("predict", "explain") else []
    result = run(*verb, NAME, *inputs, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


def test_a_revision_is_a_branch_or_a_commit(hub, bundle, tmp_path):
    first = mm.push(bundle, NAME)
    mm.remove(bundle, "b", out=tmp_path / "less")
    mm.push(tmp_path / "less", NAME, revision="small")
    assert mm.load(f"{NAME}@{first.commit}").tasks == mm.load(NAME).tasks == ["a", "b", "c"]
    assert mm.load(f"{NAME}@small").tasks == ["a", "c"]


def test_a_folder_of_the_same_name_goes_first(hub, bundle, here):
    shutil.copytree(bundle, here / "me" / "bundle")
    assert mm.load(NAME).tasks == ["a", "b", "c"] and not hub.asked


def test_only_files_that_the_manifest_lists_are_fetched(hub, bundle):
    hub.hold(NAME, bundle)
    repo = hub.repositories[NAME]
    repo.commits[repo.branches["main"]] |= {
        "modeling.py": Blob(b"code", lfs=False),
        "base/x.bin": Blob(b"!", lfs=False),
    }
    mm.load(NAME)
    assert hub.count("modeling.py") == hub.count("x.bin") == 0


def test_what_is_in_the_cache_is_not_fetched_again(hub, bundle):
    hub.hold(NAME, bundle)
    mm.load(NAME)
    before = hub.count("GET /")
    mm.load(NAME)
    assert hub.count("GET /") == before  # one HEAD tells that nothing is new


def test_a_bundle_in_the_cache_is_read_offline(hub, bundle, monkeypatch):
    hub.hold(NAME, bundle)
    mm.load(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert mm.load(NAME).tasks == ["a", "b", "c"]


def test_offline_and_not_in_the_cache_is_an_error_with_a_way_out(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = run("predict", NAME, "a text")
    assert result.exit_code == 1 and "not in the hub's cache" in result.stderr and "while online" in result.stderr


def test_an_unknown_revision_is_named(hub, bundle):
    hub.hold(NAME, bundle)
    with pytest.raises(InputError, match="me/bundle: has no revision v9"):
        mm.load(f"{NAME}@v9")


def test_an_unknown_repository_is_named(hub):
    with pytest.raises(InputError, match=r"me/other: the hub has no such repository, or a private one"):
        mm.load("me/other")


def test_a_repository_without_a_manifest_is_no_bundle(hub, bundle):
    hub.hold(NAME, bundle)
    hub.repositories[NAME].commit("main", {"config.json": Blob(b"{}", lfs=False)}, "another model")
    with pytest.raises(InputError, match=r"me/bundle: not a bundle \(no mass.json"):
        mm.load(NAME)


def test_a_private_bundle_needs_the_token(hub, bundle, tmp_path, monkeypatch):
    mm.push(bundle, NAME, private=True)
    use_hub(monkeypatch, hub, tmp_path / "other", token=None)
    with pytest.raises(InputError, match="hf auth login"):
        mm.load(NAME)
    assert mm.pull(NAME, token=TOKEN).is_dir()


def test_a_card_that_was_edited_on_the_hub_is_no_damage(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    repo = hub.repositories[NAME]
    repo.commits[repo.branches["main"]]["README.md"] = Blob(b"# Better words", lfs=False)
    mm.load(NAME, check=True)
    copy = mm.pull(NAME, tmp_path / "copy")
    assert (copy / "README.md").read_text() == "# Better words" and mm.verify(copy).ok


def test_a_file_that_was_changed_on_the_hub_is_damage(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    repo = hub.repositories[NAME]
    files = repo.commits[repo.branches["main"]]
    files["recipe.yaml"] = Blob(files["recipe.yaml"].data.replace(b"base", b"BASE"), lfs=False)
    with pytest.raises(InputError, match=r"damaged:\s+recipe.yaml"):
        mm.load(NAME, check=True)
    with pytest.raises(InputError, match=r"damaged on the hub:\s+recipe.yaml"):
        mm.pull(NAME, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_file_that_leads_out_of_the_cache_is_refused(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    snapshot = mm.pull(NAME)
    link = snapshot / "recipe.yaml"
    assert link.is_symlink()
    secret = tmp_path / "secret.yaml"
    secret.write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(InputError, match=r"names 'recipe.yaml', which is outside of the bundle"):
        mm.load(snapshot)


# Pull


def test_a_pull_makes_a_folder_of_its_own_that_can_be_changed(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    copy = mm.pull(NAME, tmp_path / "copy")
    assert files_of(copy) == files_of(bundle) and not any(p.is_symlink() for p in copy.rglob("*"))
    mm.remove(copy, "b")
    assert mm.load(copy).tasks == ["a", "c"] and mm.load(NAME).tasks == ["a", "b", "c"]


def test_a_pull_without_a_folder_stays_in_the_cache(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    said = json.loads(run("pull", NAME, "--json").stdout)
    assert Path(said["path"]).is_relative_to(tmp_path / "cache") and said["files"] == len(
        read_manifest(bundle)["files"]
    )


def test_a_download_that_broke_off_is_continued(hub, bundle, monkeypatch):
    hub.hold(NAME, bundle)
    large = Blob((bundle / FACTORS).read_bytes(), lfs=True)
    hub.cut[large.sha256] = 1000
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
    mm.pull(NAME)
    assert hub.count(f"RANGE 1000 {large.sha256}") == 1


def test_a_file_that_is_damaged_in_the_cache_is_fetched_again_by_a_pull(hub, bundle):
    hub.hold(NAME, bundle)
    snapshot = mm.pull(NAME)
    place = (snapshot / FACTORS).resolve()
    place.write_bytes(place.read_bytes()[:-1] + b"?")
    assert mm.verify(mm.pull(NAME)).ok


def test_a_folder_that_is_taken_is_left_alone(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    for options, words in (([], "already exists"), (["--overwrite"], "not a bundle")):
        result = run("pull", NAME, tmp_path / "taken", *options)
        assert result.exit_code == 2 and words in result.stderr
    assert (tmp_path / "taken" / "mine.txt").read_text() == "mine"


def test_a_bundle_at_the_folder_is_replaced_if_asked_for(hub, bundle, tmp_path):
    hub.hold(NAME, bundle)
    copy = mm.pull(NAME, tmp_path / "copy")
    mm.remove(copy, "b")
    assert mm.load(mm.pull(NAME, copy, overwrite=True)).tasks == ["a", "b", "c"]


@pytest.mark.parametrize("verb", [["remove", NAME, "b"], ["add", NAME, "d=x"], ["calibrate", NAME, "--inputs", "a=x"]])
def test_verbs_that_change_a_bundle_ask_for_a_pull_first(hub, bundle, here, verb):
    hub.hold(NAME, bundle)
    result = run(*verb)
    assert result.exit_code == 2 and "first `mass pull` it" in result.stderr, result.stderr
    assert not any(here.glob("me"))
