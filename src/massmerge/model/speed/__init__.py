"""What makes answers faster and changes nothing else; `MASS_PLAIN=1` in the environment leaves all of it out."""

import os


def plain() -> bool:
    """Whether everything is to run the plain way: one thread's order, no packed, cut or cached weights."""
    return os.environ.get("MASS_PLAIN", "0") not in ("", "0")
