"""Recipes at addresses: what they name beside themselves gets addresses too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from massmerge.io.addresses import is_address, join, parent
from massmerge.io.remote import list_files, look_up
from massmerge.io.remote_cache import fetched
from massmerge.recipe import FileHead, Recipe, TaskRecipe, TextHead

_BESIDE = ("config.json", "adapter_config.json")  # what a folder on a web server is known by


def load_recipe(path: str | Path, folder: str | Path | None = None) -> tuple[Recipe, Path]:
    """A recipe, and the folder that its relative paths start from; at an address they start from its own.

    Args:
        path: a path or an address.
        folder: the folder, if it is not the recipe's own.

    Raises:
        InputError: it cannot be read, or says something that no recipe says.
    """
    if not is_address(path):
        return Recipe.load(path), Path(folder) if folder is not None else Path(path).resolve().parent
    recipe, home = Recipe.load(fetched(str(path))), parent(str(path))
    return (recipe if folder is not None else _anchored(recipe, home)), Path(folder or ".")


def _anchored(recipe: Recipe, home: str) -> Recipe:
    """The recipe with addresses in the place of names that are found beside it."""

    def head(given: FileHead | TextHead) -> FileHead | TextHead:
        """A head with addresses of its files."""
        return given.model_copy(update={key: _found(value, home) for key, value in given})

    def task(given: TaskRecipe) -> TaskRecipe:
        """A task with addresses of its expert, files and heads."""
        named = {key: _found(getattr(given, key), home) for key in ("expert", "labels", "inputs")}
        own = None if given.head is None else head(given.head)
        return given.model_copy(
            update={**named, "head": own, "heads": {name: head(one) for name, one in given.heads.items()}}
        )

    named = {"base": _found(recipe.base, home), "processor": _found(recipe.processor, home)}
    return recipe.model_copy(update={**named, "tasks": [task(one) for one in recipe.tasks]})


def _found(value: Any, home: str) -> Any:
    """The address of a file or folder beside the recipe; anything else as it is, such as a hub id."""
    if not isinstance(value, str) or is_address(value) or value.startswith(("/", "~", "..")):
        return value
    address = join(home, value.removeprefix("./").rstrip("/"))
    there = look_up(address) is not None or list_files(address, _BESIDE)
    return address if there else value
