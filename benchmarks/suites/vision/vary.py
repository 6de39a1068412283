"""Images as they might have been taken too, so that a small task is not learned by heart."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageEnhance, ImageOps


def other_part(image: Image.Image, chance: random.Random) -> Image.Image:
    """A photograph's part of a sixth of its area or more, a little stretched, mirrored half of the time, in other light."""
    area, shape = chance.uniform(0.16, 1.0), math.exp(chance.uniform(-0.29, 0.29))
    width = min(image.width, round(image.width * math.sqrt(area * shape)))
    height = min(image.height, round(image.height * math.sqrt(area / shape)))
    left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
    part = image.crop((left, top, left + width, top + height)).resize(image.size, Image.Resampling.BICUBIC)
    return _other_light(ImageOps.mirror(part) if chance.random() < 0.5 else part, 0.3, chance)


def turned(image: Image.Image, chance: random.Random) -> Image.Image:
    """A thing that may lie the other way round, mirrored half of the time, in other light."""
    part = image.rotate(180) if chance.random() < 0.5 else image
    return _other_light(ImageOps.mirror(part) if chance.random() < 0.5 else part, 0.2, chance)


def _other_light(image: Image.Image, most: float, chance: random.Random) -> Image.Image:
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(chance.uniform(1 - most, 1 + most))
    return image
