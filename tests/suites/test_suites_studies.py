"""The page of a suite's studies: who won, what was run, in order, with pictures that are there, and what was not."""

import json
import re

from benchmarks.suites.studies import main, write_page

REPORT = "# {0}: s\n\n- {1}\n\n![What it shows.]({0}.png)\n\n"
REPORT += "## How it was measured\n\n- command: `mass study {0} --out /x/y`\n"


def write_study(folder, name, finding="a finding", mass_value=0.9):
    (folder / name).mkdir(parents=True)
    verdict = {"measure": "accuracy", "best": "other", "best_value": 0.8, "mass": "default", "mass_value": mass_value}
    about = {"title": f"About {name}", "suite": "s", "data": {"a": {"rows": 5, "total": 9}}, "verdict": verdict}
    (folder / name / "result.json").write_text(json.dumps(about))
    (folder / name / "report.md").write_text(REPORT.format(name, finding))
    (folder / name / f"{name}.png").write_bytes(f"{name} {finding}".encode())


def headings(text):
    return re.findall(r"^#+ .*", text, re.MULTILINE)


def test_reports_become_sections_of_one_page_and_what_is_missing_is_named(tmp_path):
    for name in ("batch", "layers"):
        write_study(tmp_path / "study", name)
    text = write_page([tmp_path / "study"], "text", tmp_path).read_text()
    assert headings(text) == [
        "# Studies of MASS on s", "## Who won", "## What was measured", "## layers: About layers", "## batch: About batch"
    ]  # fmt: skip
    assert "Not run on this suite yet: methods, routers" in text and "**2 of 2** studies are won" in text
    for name in ("batch", "layers"):
        assert f"- command: `mass study {name} --out study`" in text
        assert f"![What it shows.](studies-text-{name}.png)" in text
        assert (tmp_path / f"studies-text-{name}.png").read_bytes() == f"{name} a finding".encode()


def test_a_study_that_was_run_again_takes_the_place_of_the_first(tmp_path):
    write_study(tmp_path / "old", "layers")
    write_study(tmp_path / "old", "batch")
    write_study(tmp_path / "new", "layers", "a newer finding", mass_value=0.7)
    text = write_page([tmp_path / "old", tmp_path / "new"], "text", tmp_path).read_text()
    assert text.count("a newer finding") == text.count("a finding") == 1
    assert "**1 of 2** studies are won" in text
    assert "layers: other is the best: accuracy 80.0 %, MASS (default) 70.0 %" in text
    assert (tmp_path / "studies-text-layers.png").read_bytes() == b"layers a newer finding"


def test_what_somebody_noted_on_the_page_stays(tmp_path):
    write_study(tmp_path / "study", "layers")
    path = write_page([tmp_path / "study"], "text", tmp_path)
    path.write_text(path.read_text().replace("## Who won", "<!-- note -->\nMind the gap.\n<!-- end -->\n\n## Who won"))
    assert "Mind the gap." in write_page([tmp_path / "study"], "text", tmp_path).read_text()


def test_without_studies_the_command_says_how_to_run_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    assert main(["text", "--publish", str(tmp_path), "--study", "mine"]) == 2
    assert "Run `mass study NAME … --out mine`" in capsys.readouterr().err
