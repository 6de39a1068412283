"""Nothing goes unnamed: pages name every verb, option, key, public name and folder, and links lead somewhere."""

import os
import re
from pathlib import Path

import pytest
import yaml
from click import Group
from pydantic import BaseModel

import massmerge
from doc_pages import ALL_PAGES, DOCS, ROOT, blocks, name_of
from massmerge.cli.main import VERBS, main
from massmerge.recipe import Recipe


def verbs() -> dict:
    assert isinstance(main, Group)
    return {name: main.get_command(None, name) for name in VERBS}


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_a_page_that_names_each_of_its_options(verb):
    text = (DOCS / f"{verb}.md").read_text(encoding="utf-8")
    options = [option for parameter in verbs()[verb].params for option in parameter.opts if option.startswith("-")]
    assert [option for option in options if f"`{option}" not in text and f", {option}" not in text] == []


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_page_has_the_same_parts(verb):
    text = (DOCS / f"{verb}.md").read_text(encoding="utf-8")
    for title in ("Synopsis", "Options", "Example", "Exit codes", "Common errors"):
        assert f"\n## {title}\n" in text


@pytest.mark.parametrize("verb", verbs())
def test_every_message_among_the_common_errors_is_one_of_the_codes(verb):
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources) + os.strerror(13)
    section = (DOCS / f"{verb}.md").read_text(encoding="utf-8").partition("## Common errors")[2]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert messages
    for message in messages:
        # Between the names and numbers of one case stands what the code says in every case.
        fixed = max(re.split(r"…|'[^']*'|\b[\d,]+\b|\bprototype\b|\btsv_m\b|topic, mood", message), key=len).strip()
        assert fixed in sources, message


def recipe_keys(part: type[BaseModel], path: str = "") -> list[str]:
    """Every key of a recipe with the keys above it, such as `router.top_k`."""
    keys = []
    for name, field in part.model_fields.items():
        keys.append(f"{path}{name}")
        for inner in _models_in(field.annotation):
            keys += recipe_keys(inner, f"{path}{name}.")
    return keys


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def test_every_recipe_key_stands_on_its_page():
    text = (DOCS / "recipe.md").read_text(encoding="utf-8")
    keys = recipe_keys(Recipe)
    assert "router.top_k" in keys and "tasks.head.normalize" in keys
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_every_recipe_on_its_page_is_one():
    whole = [b for b in blocks(DOCS / "recipe.md") if b.language == "yaml" and "part" not in b.words]
    assert whole
    assert all(Recipe.parse(block.text).tasks for block in whole)


def test_the_defaults_on_the_recipe_page_are_the_defaults():
    shown = next(block for block in blocks(DOCS / "recipe.md") if "defaults" in block.words)
    least = Recipe.parse("base: base\ntasks: [{name: spam, expert: spam}, {name: topic, expert: topic}]")
    assert Recipe.parse(shown.text) == least


def test_every_public_name_stands_on_the_python_page():
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    assert [name for name in massmerge.__all__ if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)] == []


def test_every_public_member_of_a_model_and_its_answers_stands_on_the_python_page():
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    for kind in (massmerge.Model, massmerge.Prediction, massmerge.Generation, massmerge.Routing, massmerge.Answer):
        own = {name for part in kind.__mro__[:-1] for name in vars(part)}
        names = {*own, *getattr(kind, "__dataclass_fields__", ())}
        assert [name for name in sorted(names) if not name.startswith("_") and f"`{name}" not in text] == []


def test_every_folder_stands_on_the_architecture_page():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "massmerge"
    folders = {path.parent.relative_to(source).as_posix() for path in source.rglob("*.py")} - {"."}
    named = set(re.findall(r"[\w/]+/", text))
    assert sorted(folder for folder in folders if f"{folder}/" not in named) == []


def test_every_path_on_the_architecture_page_exists():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "massmerge"
    paths = re.findall(r"(?<![\w/.])[\w/]+(?:/|\.py)(?![\w*])", text)
    assert len(paths) > 30
    assert (
        sorted({path for path in paths if not any((root / path).exists() for root in (ROOT, source))} - {"__init__.py"})
        == []
    )


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, heading = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        outside = page.is_relative_to(DOCS) and not path.is_relative_to(DOCS)  # the site holds docs/ only
        if outside or not path.exists() or (heading and heading not in headings(path)):
            broken.append(link)
    assert broken == []


def headings(page: Path) -> set[str]:
    """Anchors of a page, as Markdown readers make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_site_lists_every_page_once():
    pages = list(_strings(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(pages) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return [text for part in inner for text in _strings(part)]
