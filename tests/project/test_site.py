"""The site that `make docs` builds from docs/."""

import re
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

import massmerge

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_site_shows_every_heading_and_table_of_every_page(tmp_path):
    """Each fence opens and closes one block: a page whose fences are not understood loses what follows them."""
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    for page in (page for page in DOCS.rglob("*.md") if page.parent.name != "reference"):
        name = page.relative_to(DOCS).with_suffix("")
        shown = (tmp_path / ("index.html" if name.name == "index" else f"{name}/index.html")).read_text(
            encoding="utf-8"
        )
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert shown.count("<h2 id=") == len(re.findall(r"^## ", text, re.MULTILINE)), name
        assert shown.count("<table>") == len(re.findall(r"^\|[ |:-]+\|$", text, re.MULTILINE)), name
        assert "```" not in shown, name


def test_the_reference_describes_every_public_name():
    """Generated from docstrings: a name of the public surface without its place in docs/reference/ fails here."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    public = [name for name in massmerge.__all__ if not name.startswith("__")]
    assert [name for name in public if f"::: massmerge.{name}\n" not in pages + "\n"] == []
