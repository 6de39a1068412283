"""The page of a suite's studies: what was run, in order, with pictures that are there, and what was not."""

import re

from benchmarks.suites.studies import main, write_page

REPORT = (
    "# {0}: s\n\n- a finding\n\n![What it shows.]({0}.png)\n\n## How it was measured\n\n- command: `mass study {0}`\n"
)


def test_reports_become_sections_of_one_page_and_what_is_missing_is_named(tmp_path):
    target = tmp_path / "docs"
    target.mkdir()
    for name in ("batch", "layers"):
        (tmp_path / "study" / name).mkdir(parents=True)
        (tmp_path / "study" / name / "report.md").write_text(REPORT.format(name))
        (tmp_path / "study" / name / f"{name}.png").write_bytes(name.encode())
    text = write_page(tmp_path / "study", "text", target).read_text()
    assert re.findall(r"^#+ .*", text, re.MULTILINE) == ["# Studies on the text suite", "## layers: s", "## batch: s"]
    assert "Not run on this suite yet: methods, routers" in text
    for name in ("batch", "layers"):
        assert f"![What it shows.](studies-text-{name}.png)" in text
        assert (target / f"studies-text-{name}.png").read_bytes() == name.encode()


def test_a_report_of_all_studies_is_the_page(tmp_path):
    target = tmp_path / "docs"
    target.mkdir()
    (tmp_path / "study" / "layers").mkdir(parents=True)
    (tmp_path / "study" / "report.md").write_text("# All\n\n## Who won\n\n![Bars.](bars.png)\n")
    (tmp_path / "study" / "bars.png").write_bytes(b"bars")
    text = write_page(tmp_path / "study", "vision", target).read_text()
    assert text.startswith("# All\n\nWhat `mass study` found") and "![Bars.](studies-vision-bars.png)" in text
    assert (target / "studies-vision-bars.png").read_bytes() == b"bars"


def test_without_studies_the_command_says_how_to_run_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MASS_CACHE", str(tmp_path))
    assert main(["text", "--publish", str(tmp_path)]) == 2
    assert "Run `mass study NAME" in capsys.readouterr().err
