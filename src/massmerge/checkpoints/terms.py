"""What the card of a base or an expert says about its licence and languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from massmerge.checkpoints.sources import CARD, Source

_LIMIT = 1_000_000  # characters of a card that are looked at
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")  # what the hub takes for a licence or a language


@dataclass(frozen=True)
class Terms:
    """Licence and languages by the names that the hub has for them; nothing where a card says nothing."""

    license: str | None = None
    languages: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What a manifest keeps of them."""
        return {k: v for k, v in {"license": self.license, "languages": list(self.languages)}.items() if v}

    @classmethod
    def of(cls, data: Any) -> Terms:
        """Terms from what somebody wrote; what has no such form is as if it were not there."""
        data = data if isinstance(data, dict) else {}
        names = data.get("languages", data.get("language"))
        licenses = _words(data.get("license"))
        return cls(licenses[0] if len(licenses) == 1 else None, tuple(_words(names)))


def _words(value: Any) -> list[str]:
    given = value if isinstance(value, list) else [value]
    return [word for word in given if isinstance(word, str) and _WORD.fullmatch(word)]


def terms_of(source: Source) -> Terms:
    """The terms that the card in a folder names."""
    path = source.file(CARD)
    return Terms.of(front_matter(path.read_text(encoding="utf-8", errors="replace")[:_LIMIT])[0]) if path else Terms()


def front_matter(card: str) -> tuple[dict[str, Any], str]:
    """The metadata of a card, and the text behind it."""
    found = re.match(r"---\r?\n(.*?)\r?\n---[ \t]*\r?\n", card, re.DOTALL)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, RecursionError):
        data = None
    return (data, card[found.end() :]) if found and isinstance(data, dict) else ({}, card)


def with_front_matter(data: dict[str, Any], text: str) -> str:
    """A card of metadata and text."""
    return "---\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True) + "---\n" + text
