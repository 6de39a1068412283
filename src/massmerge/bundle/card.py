"""The card of a bundle, which may change after the merge: what was measured enters it."""

from __future__ import annotations

from pathlib import Path

from massmerge.bundle.layout import CARD, LEFT_OVER, MANIFEST
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import link_tree


def card_entry(folder: Path) -> dict[str, object]:
    """What a manifest says of the card in a folder."""
    return {"bytes": (folder / CARD).stat().st_size, "sha256": file_sha256(folder / CARD)}


def replace_card(bundle: Path, text: str) -> None:
    """Give a bundle another card, in one step; all other files stay what they are."""
    work = WorkFolder(bundle)
    with in_words(work.path), work.held():
        try:
            manifest, result = read_manifest(bundle), work.fresh_result()
            link_tree(bundle, result, leave_out=(MANIFEST, CARD, *LEFT_OVER))
            (result / CARD).write_text(text, encoding="utf-8", newline="\n")
            sign_manifest(result, {**manifest, "files": {**manifest["files"], CARD: card_entry(result)}})
            work.publish(replacing=True)
        finally:
            work.discard()
