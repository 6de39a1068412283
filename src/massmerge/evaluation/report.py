"""Reports as Markdown and as one HTML file with everything in it, from the same parts."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from massmerge.errors import MassError
from massmerge.io.durable import write_text

_DRAWN = 64  # figures that are kept as drawn


@dataclass(frozen=True)
class Heading:
    """A title inside of the report."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `code` stands between backticks."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Numbers:
    """The few figures that matter most, each with what it is."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """Rows under headers. The first column holds names, the others stand to the right; the last row may be a sum."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: bool = False


@dataclass(frozen=True)
class Picture:
    """A plot, with the words that stand under it."""

    name: str
    caption: str
    figure: Any


Part = Heading | Text | Items | Numbers | Table | Picture


def require_matplotlib() -> None:
    """Refuse before any work what could not be drawn at its end.

    Raises:
        MassError: matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MassError(
            "a report has plots, which need matplotlib: pip install 'massmerge[eval]'. Leave --report out "
            "to get the figures only."
        ) from None


def write_report(folder: Path, title: str, parts: Sequence[Part]) -> None:
    """Write `report.md` with its plots beside it, and `report.html` that holds all of them itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if isinstance(part, Picture):
            (folder / f"{part.name}.png").write_bytes(_png(part.figure))
    write_text(folder / "report.md", as_markdown(title, parts))
    write_text(folder / "report.html", as_html(title, parts))


# Markdown


def as_markdown(title: str, parts: Sequence[Part]) -> str:
    """The report as Markdown; plots are files beside it."""
    return "\n\n".join([f"# {title}", *map(_markdown, parts)]) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Numbers(pairs):
            return "\n".join(f"- **{value}** {what}" for value, what in pairs)
        case Table():
            return _markdown_table(part)
        case Picture(name, caption, _):
            return f"![{caption}]({name}.png)\n\n*{caption}*"


def _markdown_table(table: Table) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    if table.total and rows:
        rows[-1] = [f"**{cell}**" if cell else "" for cell in rows[-1]]
    lines = [list(table.headers), ["---", *["---:"] * (len(table.headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# HTML

_STYLE = """
:root { color-scheme: light; --ink: #22303a; --quiet: #5d6b75; --line: #dde3e8; --blue: #0072b2; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink); background: #fff;
  max-width: 1040px; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
code { background: #f1f4f6; border-radius: 4px; padding: .1em .35em; font-size: .9em; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.numbers div { border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; }
.numbers b { display: block; font-size: 1.5rem; color: var(--blue); font-variant-numeric: tabular-nums; }
.numbers span { color: var(--quiet); font-size: .88rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--quiet); font-weight: 600; } tr.total td { font-weight: 600; border-top: 2px solid var(--ink); }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: var(--quiet); font-size: .9rem; margin-top: .25rem; }
"""


def as_html(title: str, parts: Sequence[Part]) -> str:
    """The report as one HTML file that needs no other."""
    body = "\n".join([f"<h1>{_inline(title)}</h1>", *map(_html, parts)])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _html(part: Part) -> str:
    match part:
        case Heading(text):
            return f"<h2>{_inline(text)}</h2>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Numbers(pairs):
            cards = "".join(f"<div><b>{_inline(value)}</b><span>{_inline(what)}</span></div>" for value, what in pairs)
            return f'<div class="numbers">{cards}</div>'
        case Table():
            return _html_table(part)
        case Picture(_, caption, figure):
            image = f'<img alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{_svg(figure)}">'
            return f"<figure>{image}<figcaption>{_inline(caption)}</figcaption></figure>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.headers)
    rows = []
    for number, row in enumerate(table.rows, 1):
        kind = ' class="total"' if table.total and number == len(table.rows) else ""
        rows.append(f"<tr{kind}>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


@lru_cache(_DRAWN)
def _png(figure: Any) -> bytes:
    """A figure as PNG, drawn once though several reports show it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight", facecolor="white")
    return buffer.getvalue()


@lru_cache(_DRAWN)
def _svg(figure: Any) -> str:
    """A figure as SVG in base64; the same figure gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "massmerge"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode("ascii")
