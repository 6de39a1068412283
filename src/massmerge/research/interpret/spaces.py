"""Where texts and singular vectors meet: the residual stream of a text model, or the joint space of a CLIP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import find_source, open_base
from massmerge.errors import InputError
from massmerge.merging.heads.text import TextTower
from massmerge.model.model import Model
from massmerge.model.route.first_pass import FirstPass, Voter
from massmerge.routing import Site

_BATCH = 64
_PROJECTION = "visual_projection.weight"


class TextSpace(Protocol):
    """A space that texts and vectors are brought into."""

    def place(self, texts: list[str], sites: list[Site], progress: Callable[[str], None]) -> dict[str, Tensor]:
        """The texts (n, d) at length 1, for each site by name."""
        ...

    def project(self, vectors: Tensor) -> Tensor:
        """Vectors (k, width) at a site, in this space (k, d)."""
        ...


class StreamSpace:
    """The activations at a site itself: a text is what the base makes of it there, the mean over its tokens.

    Activations share one large direction that tells no text from another; it is taken out by subtracting their mean.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    @torch.inference_mode()
    def place(self, texts: list[str], sites: list[Site], progress: Callable[[str], None]) -> dict[str, Tensor]:
        """The texts' activations at the sites, from one pass."""
        core = self._model.core
        first_pass = FirstPass(core.base, [Voter(site, "mean") for site in sites])
        rows = [core.reader.row(text) for text in texts]
        order = sorted(range(len(rows)), key=lambda i: rows[i]["input_ids"].shape[0])  # little padding
        found: list[list[Tensor]] = []
        for start in range(0, len(order), _BATCH):
            batch = core.batch([rows[i] for i in order[start : start + _BATCH]])
            found.append([seen.pooled() for seen in first_pass(batch)])
            progress("texts")
        back = torch.argsort(torch.tensor(order))
        joined = [torch.cat(parts)[back] for parts in zip(*found, strict=True)]
        return {site.name: normalize(z - z.mean(0), dim=1) for site, z in zip(sites, joined, strict=True)}

    def project(self, vectors: Tensor) -> Tensor:
        """Vectors at a site are of the stream already."""
        return vectors


class ClipSpace:
    """The joint space of a CLIP model: texts through its text tower, vectors through its visual projection.

    Args:
        model: a bundle of CLIP vision towers.
        source: the whole CLIP model; where the bundle's base came from by default.

    Raises:
        InputError: it is no CLIP with a visual projection, or another one than the towers are of.
    """

    def __init__(self, model: Model, source: str | None) -> None:
        bundle = Bundle(model.sets.bundle, check=False)
        tower = model.core.base.config
        if tower.model_type.startswith("siglip"):
            raise InputError(
                f"a {type(model.core.base).__name__} cannot be decoded: between its blocks and its texts lies no visual "
                "projection but attention, which no vector goes through by itself. CLIP's towers can be, and text models."
            )
        said = source or bundle.recipe.base
        try:
            found = find_source(said, Path(), download=True)
            base = open_base(found)
        except InputError as error:
            raise InputError(
                f"no CLIP model with a text tower can be opened: {error} Images need one to meet texts; name it "
                "(`clip=`, `--clip`)."
            ) from None
        vision = getattr(base.skeleton.config, "vision_config", None)
        same = vision is not None and (vision.model_type, vision.hidden_size) == (tower.model_type, tower.hidden_size)
        if _PROJECTION not in base.readings or not same:
            raise InputError(
                f"{said}: a {base.skeleton.class_name} without a visual projection from the {tower.hidden_size} features of "
                f"this bundle's {type(model.core.base).__name__}. Name the CLIP model whose vision tower the base is "
                "(`clip=`, `--clip`)."
            )
        self._projection = base.read(_PROJECTION).float()
        named = bundle.recipe.processor is not None  # a state dict has no tokenizer by itself
        own = find_source(str(bundle.processor_folder), Path(), download=False) if named else found
        self._tower = TextTower(base, own)

    def place(self, texts: list[str], sites: list[Site], progress: Callable[[str], None]) -> dict[str, Tensor]:
        """The texts' embeddings, the same for every site."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            parts.append(self._tower.embed(texts[start : start + _BATCH]))
            progress("texts")
        placed = torch.cat(parts)
        return {site.name: placed for site in sites}

    def project(self, vectors: Tensor) -> Tensor:
        """Vectors through the visual projection; the norm before it is left out, as in the paper."""
        return vectors @ self._projection.mT
