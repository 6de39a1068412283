"""Models of two towers, such as CLIP and SigLIP: the vision tower that is merged, the text tower that makes heads."""

from __future__ import annotations

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from massmerge.checkpoints.backbone import Base
from massmerge.checkpoints.skeleton import Skeleton, build
from massmerge.errors import InputError, listing


def has_towers(base: Base) -> bool:
    """Whether a base is a model of images and texts."""
    config = base.skeleton.config
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def vision_tower(base: Base) -> Skeleton:
    """The class that gives an image's embedding: the tower, with the projection behind it where there is one."""
    return build(*_tower(base, "vision"))


def text_model(base: Base) -> PreTrainedModel:
    """The text tower with its weights, in float32."""
    config, name = _tower(base, "text")
    skeleton = build(config, name)
    readings = skeleton.match(base.store.infos).readings
    missing = [slot for slot in skeleton.slots if slot not in readings and not skeleton.slots[slot].buffer]
    if missing:
        raise InputError(f"{base.source.text}: its text tower lacks{listing(missing)}")
    model = type(skeleton.model)(config).eval()
    state = {n: r.read(base.store, config).float() for n, r in readings.items() if n in skeleton.slots}
    model.load_state_dict(state, strict=False)
    return model


def text_width(base: Base) -> int:
    """The length of a text's embedding."""
    config = _tower(base, "text")[0]
    return int(config.projection_dim if hasattr(base.skeleton.config, "projection_dim") else config.projection_size)


def _tower(base: Base, kind: str) -> tuple[PretrainedConfig, str]:
    """The configuration and class name of a tower, by the names that transformers gives them.

    Raises:
        InputError: the base has no such tower.
    """
    family = base.skeleton.class_name.removesuffix("Model")
    config = getattr(base.skeleton.config, f"{kind}_config", None)
    tower = f"{family}{kind.capitalize()}Model"
    name = next((n for n in (f"{tower}WithProjection", tower) if hasattr(transformers, n)), None)
    if config is None or name is None:
        raise InputError(
            f"{base.source.text}: is a {base.skeleton.class_name}, which has no {kind} tower. "
            "Text heads need a whole CLIP or SigLIP as base."
        )
    if hasattr(base.skeleton.config, "projection_dim"):
        config.projection_dim = base.skeleton.config.projection_dim  # the whole model's is the one that holds
    return config, name
