"""The files of the page, without a browser."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "src" / "massmerge" / "serve" / "page"


def test_nothing_of_the_page_is_inline_or_from_elsewhere():
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|style=|<script(?![^>]*\bsrc=)|\son\w+=|javascript:", html)
    for path in PAGE.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())
        assert set(addresses) <= {"http://www.w3.org"}, path.name  # the name of SVG, which nobody asks for


def test_text_has_enough_contrast_in_light_and_dark():
    css = (PAGE / "style.css").read_text()
    for scheme in re.findall(r":root \{(.*?)\}", css, re.DOTALL):
        colour = dict(re.findall(r"--([\w-]+): (#\w+);", scheme))
        for ground in ("paper", "surface", "sunk", "accent-soft", "bad-soft"):
            assert contrast(colour["ink"], colour[ground]) >= 7, ground
        for ground in ("paper", "surface", "sunk"):
            assert contrast(colour["muted"], colour[ground]) >= 4.5, ground
        for text, ground in (("accent", "paper"), ("accent", "surface"), ("accent-ink", "accent")):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
        assert contrast(colour["field"], colour["surface"]) >= 3  # the border of a field


def contrast(one, other):
    """The contrast ratio of WCAG."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
