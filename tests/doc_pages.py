"""The pages of README, docs/ and examples/, and their fenced blocks."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXT_EXAMPLES = ROOT / "examples" / "text"
# One level: whatever an example fetches lies deeper, and what others wrote there must not run.
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
ALL_PAGES = [*PAGES, *sorted(DOCS.glob("*/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, and its text."""

    language: str
    words: list[str]
    text: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and not {"norun", "server"} & {*self.words}

    @property
    def exit_code(self) -> int:
        return next((int(w.removeprefix("exit=")) for w in self.words if w.startswith("exit=")), 0)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2].split(), found[3], text[: found.start()].count("\n") + 1)
        for found in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def name_of(page: Path) -> str:
    """A page's path in the project."""
    return page.relative_to(ROOT).as_posix()
