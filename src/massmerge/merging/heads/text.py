"""Heads made of texts: class names in templates, through the base's text tower."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from massmerge.checkpoints import Base, Source
from massmerge.checkpoints.pretrained import pretrained_tokenizer
from massmerge.checkpoints.towers import text_model, text_width
from massmerge.errors import InputError
from massmerge.io.remote_cache import path_of
from massmerge.merging.heads.labels import read_labels
from massmerge.recipe import TextHead

_BATCH = 64
PLACE = "{}"


class TextTower:
    """The text tower of a base, loaded when it is first asked for an embedding.

    Args:
        base: the whole model, before it was narrowed to its vision tower.
        tokenizer: where the tokenizer's files are.
    """

    def __init__(self, base: Base, tokenizer: Source) -> None:
        self._base, self._source = base, tokenizer

    @property
    def width(self) -> int:
        """The length of an embedding."""
        return text_width(self._base)

    @cached_property
    def scale(self) -> float:
        """What cosines of images and texts are multiplied by: the model keeps its logarithm."""
        return float(self._number("logit_scale").exp())

    @cached_property
    def bias(self) -> float | None:
        """What is added to them; SigLIP has such a number."""
        return float(self._number("logit_bias")) if "logit_bias" in self._base.readings else None

    def _number(self, name: str) -> Tensor:
        return self._base.read(name).float().reshape(())

    @cached_property
    def _model(self) -> PreTrainedModel:
        return text_model(self._base)

    @cached_property
    def _tokenizer(self) -> Any:
        folder = self._source.configs
        assert folder is not None, "heads are made in a merge, which has downloaded what it reads"
        try:
            return pretrained_tokenizer(folder)
        except InputError as error:
            raise InputError(
                f"{self._source.text}: contains no tokenizer for the text tower: {error} "
                "Name a folder or hub id with one in `processor:`."
            ) from None

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeddings (texts, width) of length 1.

        Raises:
            InputError: there is no tokenizer.
        """
        config = self._model.config
        # SigLIP was trained on texts padded to full length and has no mask for padding.
        full = "projection_size" in config.to_dict()
        found = []
        for start in range(0, len(texts), _BATCH):
            tokens = self._tokenizer(
                list(texts[start : start + _BATCH]), padding="max_length" if full else True, truncation=True,
                max_length=config.max_position_embeddings, return_tensors="pt",
            )  # fmt: skip
            tokens = {k: v for k, v in tokens.items() if k == "input_ids" or (k == "attention_mask" and not full)}
            output = self._model(**tokens)
            embeds = getattr(output, "text_embeds", None)
            found.append(normalize(output.pooler_output if embeds is None else embeds, dim=1))
        return torch.cat(found)


def text_head(tower: TextTower, classes: Sequence[str], templates: Sequence[str]) -> dict[str, Tensor]:
    """A linear head on normalised image embeddings: `weight (classes, width)`, and `bias` where the model has one.

    Each class is the mean of its normalised texts, normalised again, times the model's scale.
    """
    rows = tower.embed([template.replace(PLACE, name) for name in classes for template in templates])
    means = rows.reshape(len(classes), len(templates), -1).mean(1)
    head = {"weight": normalize(means, dim=1) * tower.scale}
    if tower.bias is not None:
        head["bias"] = torch.full((len(classes),), tower.bias)
    return head


def read_texts(head: TextHead, folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Class names and templates of a head in a recipe.

    Raises:
        InputError: there is no class, one without a name, a template without a place for it, or no such set.
    """
    classes = read_labels(head.classes, folder)
    told = f" ({head.classes})" if isinstance(head.classes, str) else ""
    if not classes:
        raise InputError(f"the list of classes is empty{told}. Give at least one; in a file, one per line.")
    blank = [i + 1 for i, name in enumerate(classes) if not name.strip()]
    if blank:
        raise InputError(f"classes without a name: {', '.join(map(str, blank))}{told}.")
    templates = _templates(head.templates, folder)
    without = [template for template in templates if PLACE not in template]
    if without or not templates:
        wrong = (
            f"these have no placeholder for the class: {', '.join(map(repr, without))}" if without else "there are none"
        )
        raise InputError(f"templates: {wrong}. Write {PLACE} where the class goes, as in 'a photo of a {PLACE}.'.")
    return classes, templates


@cache
def template_sets() -> dict[str, tuple[str, ...]]:
    """The named sets of templates."""
    text = (Path(__file__).parent / "templates.yaml").read_text(encoding="utf-8")
    return {name: tuple(rows) for name, rows in yaml.safe_load(text).items()}


def _templates(given: str | list[str], folder: Path) -> tuple[str, ...]:
    if isinstance(given, str):
        if given in template_sets():
            return template_sets()[given]
        if not path_of(given, folder).is_file():
            known = ", ".join(template_sets())
            raise InputError(f"templates: {given!r} is neither a set nor a file. The sets are {known}.")
    return read_labels(given, folder)
