"""Images as clients send them; the size is in the header, and is checked before a pixel is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import re

from PIL import Image

from massmerge.errors import InputError

# Formats whose readers are in Pillow itself; others would call programs or have seen little testing.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,", re.IGNORECASE)


def decode_base64(text: str) -> bytes:
    """The bytes of an image that is written as base64 or as a data URL.

    Raises:
        InputError: it is neither.
    """
    found = _DATA_URL.match(text[:200])
    try:
        return base64.b64decode(text[found.end() if found else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise InputError(
            "not an image: give base64 (RFC 4648, no spaces), or a data URL such as data:image/png;base64,…"
        ) from None


def open_image(data: bytes, max_pixels: int) -> Image.Image:
    """An image whose pixels are decoded when they are asked for.

    Raises:
        InputError: it is of no format that is read here, or has too many pixels.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:  # Pillow's own limit, far above ours
        raise InputError(f"too many pixels; at most {max_pixels:,} are decoded. Scale it down.") from None
    except Exception:  # each format's reader has errors of its own for what is not as it should be
        raise InputError(f"not a readable image (supported: {', '.join(FORMATS)}).") from None
    if image.width * image.height > max_pixels:
        raise InputError(f"{image.width}×{image.height} pixels; at most {max_pixels:,} are decoded. Scale it down.")
    return image
