"""The text suite's tasks on another base, and its experts fine-tuned again with other seeds."""

import argparse
import json

import yaml

from benchmarks.suites import run, summary
from benchmarks.suites.text import experts, recipe


def _result(folder, name, share):
    figures = {key: {"value": share} for key in ("routing", "strict", "reference", "normalised", "normalised_known")}
    path = folder / "report" / name / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"tasks": [], "means": figures, "created": "2026-01-02"}))


def test_another_base_is_fine_tuned_by_the_text_suites_code_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    given = []
    monkeypatch.setattr(experts, "main", given.append)
    suite = run.open_suite("mpnet")
    run.finetune(suite, run.Batch("core", ("imdb",)), argparse.Namespace(quick=False))
    assert given == [["--tasks", "imdb", "--suite", "mpnet"]]
    assert experts.expert_folder("imdb", "full", "mpnet") == suite.folder / "experts" / "imdb"
    assert suite.folder != run.open_suite("text").folder


def test_the_recipe_of_another_base_lies_in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    suite = run.open_suite("mpnet")
    expert = suite.folder / "experts" / "imdb"
    expert.mkdir(parents=True)
    (expert / "metrics.json").write_text('{"finetuned": {"test": 0.5}}')
    written, about = suite.write_files(run.Batch("core", ("imdb",)))
    assert written.parent == about.parent == suite.folder
    assert yaml.safe_load(written.read_text())["tasks"][0]["expert"] == "experts/imdb"


def test_the_larger_base_is_fine_tuned_in_bfloat16_with_smaller_steps():
    small, large = experts.default_config("full"), experts.default_config("full", "mpnet")
    assert large.bfloat16 and not small.bfloat16
    assert large.lr < small.lr


def test_seeds_differ_in_nothing_but_the_seed():
    found = [experts.default_config(kind) for kind in ("full", "seed1", "seed2")]
    assert [config.seed for config in found] == [0, 1, 2]
    assert len({str(config).replace(f"seed={config.seed}", "") for config in found}) == 1
    assert {recipe.kind_of("seed1", task) for task in recipe.SETS["seed1"]} == {"seed1"}


def test_bundles_of_other_seeds_are_evaluated_and_nothing_more(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(run, "_once", lambda *given: measured.append(given))
    for step in (run.compare, run.rungs):
        step(run.open_suite("text"), run.Batch("seed1", ("imdb",)), argparse.Namespace(quick=False))
    assert not measured


def test_the_page_sums_up_the_seeds_in_one_table(tmp_path):
    for name, share in (("core", 0.8), ("seed1", 0.9), ("seed2", 1.0)):
        _result(tmp_path, name, share)
    page = summary.write_summary(tmp_path, "text").read_text()
    assert "| mean ± standard deviation | 90.0 ± 10.0 |" in page
    assert "| seed1 | 90.0 |" in page
    assert "## Bundle core" in page and "## Bundle seed1" not in page


def test_one_generation_of_experts_has_no_table_of_seeds(tmp_path):
    _result(tmp_path, "core", 0.8)
    assert "Other seeds" not in summary.write_summary(tmp_path, "text").read_text()
