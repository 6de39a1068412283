"""For the site: Python-Markdown takes a fence with more than its language for text, so the words after it are left out."""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with plain fences; `norun`, `output` and the like are for the tests of the examples."""
    return _FENCE.sub(r"\1", markdown)
