"""Pages of printed music and photographs of surfaces: what is of one page, or of one photograph, lies in one split."""

from __future__ import annotations

import gzip
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from benchmarks.suites.fetch import deb_archive
from benchmarks.suites.vision.examples import Examples, drawn, over

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

# What a texture is of, by a word in its name.
MATERIALS = {
    "bark": "wood", "brick": "brick", "bricks": "brick", "carpet": "carpet", "concrete": "concrete", "crete": "concrete",
    "desert": "sand", "dirt": "earth", "grass": "grass", "ground": "earth", "metal": "metal", "metall": "metal",
    "planks": "wood", "rock": "rock", "roof": "roof", "sand": "sand", "tile": "tiles", "tiles": "tiles",
    "wallpaper": "wallpaper", "wood": "wood",
}  # fmt: skip
# Maps of relief, gloss and glow, walls of aliens' ships, and things.
OTHER = r"_(nm|gm|sm|rm)$|^ab_|door|window|sign|box"


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


def surfaces() -> Examples:
    """Quarters of textures of a game, mostly photographs, 128 × 128: of which material."""
    digest = "51c9c6a778249a3fa432c81c8c30ac5675ae5a1e675a33b0ce04545753d3218c"
    folder = deb_archive("ufoai-textures", sha256=digest)
    rows = []
    with zipfile.ZipFile(folder / "usr" / "share" / "games" / "ufoai" / "base" / "0textures.pk3") as archive:
        for name in sorted(archive.namelist()):
            if kind := material(name):
                with Image.open(io.BytesIO(archive.read(name))) as opened:
                    rows += [(part, kind, photograph(name)) for part in quarters(opened.convert("RGB"))]
    return drawn(rows, [folder], "GPL-2, GPL-2+, MIT, CC-BY-SA-3.0, public domain, by texture")


def material(name: str) -> str | None:
    """What a texture is of by its name, None if that says nothing or two things, or if it is a map of relief or gloss."""
    stem, kind = Path(name).stem, Path(name).suffix
    if kind not in (".jpg", ".png") or re.search(OTHER, stem):
        return None
    found = {MATERIALS[word] for word in re.findall(r"[a-z]+", stem.lower()) if word in MATERIALS}
    return found.pop() if len(found) == 1 else None


def photograph(name: str) -> str:
    """What a texture was made from, by its name: what follows the number, or a last single letter, is a variation."""
    stem = name.rsplit(".", 1)[0]
    return re.sub(r"(\d)[a-z_].*$|_[a-z]$", r"\1", stem.rsplit("/", 1)[1]) + stem.rsplit("/", 1)[0]


def quarters(image: Image.Image) -> Iterator[Image.Image]:
    """The four quarters of an image, at 128 × 128."""
    image = image.resize((256, 256))
    for left, top in ((0, 0), (128, 0), (0, 128), (128, 128)):
        yield image.crop((left, top, left + 128, top + 128))
