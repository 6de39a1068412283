"""The checks of a release find what they are for."""

import shutil
from pathlib import Path

from release_check import DEMO, NEEDED, changelog_faults, licence_faults, version, wheel_faults

ROOT = Path(__file__).parents[2]
WHEEL = [f"massmerge/{name}" for name in NEEDED]


def test_the_changelog_has_the_version():
    assert changelog_faults((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version()) == []


def test_a_changelog_of_another_version_is_a_fault():
    assert changelog_faults("# Changelog\n\n## 0.1.0, unreleased\n\n- New.\n", "0.2.0")
    assert changelog_faults("# Changelog\n\n## 0.2.0, today\n\n## 0.1.0\n\n- New.\n", "0.2.0")
    assert changelog_faults("# Changelog\n", "0.2.0")


def test_a_wheel_with_too_little_or_too_much_is_a_fault():
    assert wheel_faults(WHEEL) == []
    assert wheel_faults(WHEEL[1:]) == ["LICENSE is missing"]
    assert wheel_faults([*WHEEL, "massmerge/model.pkl", "tests/conftest.py"]) == [
        "massmerge/model.pkl is in it", "tests/conftest.py is in it",
    ]  # fmt: skip


def test_carried_data_has_its_licences():
    assert licence_faults() == []


def test_carried_data_without_a_licence_is_a_fault(tmp_path):
    data = shutil.copytree(DEMO, tmp_path / "data", ignore=shutil.ignore_patterns("*.safetensors"))
    (data / "rows" / "new.jsonl").write_text("")
    assert licence_faults(data) == ["new has no licence in LICENCES.md"]


def test_a_licence_whose_text_is_missing_is_a_fault(tmp_path):
    data = shutil.copytree(DEMO, tmp_path / "data", ignore=shutil.ignore_patterns("*.safetensors"))
    text = (data / "LICENCES.md").read_text(encoding="utf-8")
    (data / "LICENCES.md").write_text(text.replace("## MIT (imdb)", "## MIT"), encoding="utf-8")
    assert licence_faults(data) == ["the text of the licence of imdb (MIT) is missing"]
