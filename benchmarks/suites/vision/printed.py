"""Printed music and printed text: what is of one page, or of one paragraph, lies in one split."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

from PIL import Image, ImageDraw, ImageFont

from benchmarks.suites.fetch import deb_archive
from benchmarks.suites.text.unlike import UDHR, pieces
from benchmarks.suites.vision.examples import Examples, drawn, over
from benchmarks.suites.vision.glyphs import GEORGIAN

# Chapters of the manual of notation and of its collection of snippets, and what their examples are of. Left out are those
# whose examples look like any other's: of staves, voices, keyboards and annotations.
CHAPTERS = {
    "Ancient notation": "ancient",
    "Chord notation": "chords",
    "Chords": "chords",
    "Expressive marks": "expression",
    "Fretted string instruments": "fretted strings",
    "Fretted strings": "fretted strings",
    "Percussion": "percussion",
    "Pitches": "pitches",
    "Repeats": "repeats",
    "Rhythms": "rhythms",
    "Text": "text",
    "Vocal music": "voice",
}
SIDE = 144  # pixels: about two bars, still legible at the base's 98
INK = 0.02  # of a part: less is a margin, or a single sign

# Alphabets that the fonts below draw letter by letter, and a language that is written in each: names are those of the
# Universal Declaration of Human Rights in the package.
ALPHABETS = {
    "Armenian": "hye", "Cyrillic": "rus", "Georgian": "kat", "Greek": "ell_monotonic", "Hebrew": "heb", "Latin": "fin",
    "Syllabics": "ike", "Vietnamese": "vie",
}  # fmt: skip
LINES, POINTS = 7, (13, 16)  # of a page of 112 pixels; the least and the largest letters
PAGE = 112


def scores() -> Examples:
    """Parts of examples of printed music, 144 × 144: which chapter of a manual of notation they are from."""
    digest = "946f18c3407a5bd2b9d4e374d2774c547ab7c5e6f9f3e2dd66c4cc77c74f1380"
    folder = deb_archive("lilypond-doc", sha256=digest)
    share = folder / "usr" / "share"
    rows = []
    for manual in ("notation", "snippets"):
        files = sorted((share / "info").glob(f"lilypond-{manual}.info-*.gz"))
        text = "".join(gzip.decompress(path.read_bytes()).decode() for path in files)
        for name, chapter, page in pictures(text):
            path = share / "doc" / "lilypond" / "html" / "Documentation" / name
            # A chapter of the snippets is one page, though its pictures have nothing else in common.
            thread = page if manual == "notation" else name
            if path.is_file():  # a few are drawn, and stand elsewhere
                rows += [(part, chapter, thread) for part in parts(over(Image.open(path), "white").convert("L"))]
    return drawn(rows, [folder], "GFDL-1.3+")


def pictures(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, chapter and page of each picture in a manual in Info's format, of the chapters that are wanted."""
    above: dict[str, str] = {}
    page = ""
    for found in re.finditer(r'Node: ([^,\n]+)[^\n]*,\s+Up: ([^,\n]+)|image src="lilypond/([^"]+)"', text):
        if found[1]:
            page = found[1]
            above[page] = found[2]
            continue
        chapter = page
        while chapter not in CHAPTERS and chapter in above:
            chapter = above[chapter]
        if chapter in CHAPTERS:
            yield found[3], CHAPTERS[chapter], page


def parts(page: Image.Image) -> Iterator[Image.Image]:
    """The squares of a page that have ink enough, none overlapping another, on white where the page ends."""
    for top in range(0, page.height, SIDE):
        for left in range(0, page.width, SIDE):
            part = Image.new("L", (SIDE, SIDE), 255)
            part.paste(page.crop((left, top, min(page.width, left + SIDE), min(page.height, top + SIDE))))
            if sum(part.histogram()[:128]) >= INK * SIDE * SIDE:
                yield part


def alphabets() -> Examples:
    """Lines of printed text, 112 × 112: in which of eight alphabets. What is of one paragraph lies in one split."""
    udhr = UDHR.fetch()
    folders = [deb_archive(f"fonts-{name}", sha256=GEORGIAN[name]) for name in ("dejavu-core", "freefont-ttf")]
    paths = sorted(path for folder in folders for path in folder.rglob("*.ttf"))
    rows = []
    for alphabet, language in ALPHABETS.items():
        text = list(pieces((udhr / "declaration" / f"{language}.html").read_text(encoding="utf-8"), alphabet, words=7))
        letters = "".join(piece.text for piece in text)
        able = [path for path in paths if has_letters(ImageFont.truetype(path, POINTS[0]), letters)]
        for number, piece in enumerate(text):
            size = POINTS[0] + number % (POINTS[1] - POINTS[0] + 1)
            image = page_of(piece.text, ImageFont.truetype(able[number % len(able)], size))
            rows.append((image, alphabet, piece.thread))
    return drawn(rows, [udhr, *folders], "MIT (texts), free (Debian main, fonts)")


def has_letters(font: ImageFont.FreeTypeFont, text: str) -> bool:
    """Whether a font has all letters of a text: else a box for those that are missing would tell the language."""
    missing = bytes(font.getmask("\uffff"))
    return all(bytes(font.getmask(letter)) != missing for letter in set(text) - {" "})


def page_of(text: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """A text as the upper lines of a page, broken between words; what does not fit is left out."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > PAGE - 8:
            lines.append(word)
        else:
            lines[-1] = longer
    image = Image.new("L", (PAGE, PAGE), 255)
    ImageDraw.Draw(image).multiline_text((4, 4), "\n".join(lines[:LINES]), font=font, fill=0, spacing=2)
    return image
