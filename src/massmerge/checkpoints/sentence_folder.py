"""Folders of sentence-transformers: their `modules.json` lists the parts of a model and where each of them lies."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from massmerge.errors import InputError
from massmerge.io.json_file import read_json

MODULES = "modules.json"
_MOST_MODULES, _LONGEST_PATH = 100, 250


def backbone_folder(folder: Path) -> Path:
    """Where the backbone of a folder lies: in the folder, or where its `modules.json` says.

    Raises:
        InputError: the file is damaged, names a path outside of the folder, or a model without a backbone of transformers.
    """
    path = folder / MODULES
    if not path.is_file():
        return folder
    kind, place = read_modules(path)[0]
    if kind != "Transformer":
        raise InputError(f"{path}: begins with a {kind}, so there is no backbone of transformers in it.")
    return folder / place


def read_modules(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module.

    Raises:
        InputError: the file is damaged, or names a path outside of its folder.
    """
    try:
        entries = read_json(path)
        found = [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries[:_MOST_MODULES]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{path}: not a list of modules ({error!r}). Download or save it again.") from None
    places = [PurePosixPath(place) for _, place in found]
    elsewhere = (place.is_absolute() or ".." in place.parts or "\\" in str(place) for place in places)
    if not found or any(elsewhere) or any(len(str(place)) > _LONGEST_PATH for place in places):
        raise InputError(f"{path}: names no modules, or a folder outside of its own. Download or save it again.")
    return found
