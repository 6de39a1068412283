"""The lowest versions that may be installed have no hole that is known and that this program could be reached through."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SAFE = {
    "torch": "2.10",  # CVE-2025-32434 and CVE-2026-24747: `weights_only` ran code of a pickled expert
    "transformers": "5.5",  # CVE-2026-4372 and CVE-2026-5241: a config.json ran code without being trusted
    "jinja2": "3.1.6",  # CVE-2024-56326 and CVE-2025-27516: a chat template left its sandbox and ran code
    "ray": "2.54",  # CVE-2025-62593, CVE-2026-27482: pages in a browser reached the dashboard
    "pillow": "12.3",  # CVE-2026-25990 (PSD), CVE-2026-40192 (FITS), and what 12.3 mended in decoders
    "python-multipart": "0.0.27",  # CVE-2024-53981, CVE-2026-24486, CVE-2026-40347, CVE-2026-42561: bodies that stall
    "starlette": "1.3.1",  # CVE-2025-54121, CVE-2025-62727, CVE-2026-54283: forms and ranges that stall
    "h11": "0.16",  # CVE-2025-43859: two requests in one chunk
    "pyarrow": "23.0.1",  # CVE-2026-25087: use after free
    "datasets": "4.0",  # ran scripts of a data set, and asked on the terminal
    "tqdm": "4.66.3",  # CVE-2024-34062
    "filelock": "3.20.3",  # CVE-2025-68146, CVE-2026-22701: links put in place of a lock
}


def bounds() -> list[tuple[str, Version]]:
    """Every requirement of the project and its extras, with its lower bound."""
    texts = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]
    found = [r for text in texts if (r := Requirement(text)).specifier]
    return [(r.name, Version(next(s.version for s in r.specifier if s.operator in (">=", "==")))) for r in found]


@pytest.mark.parametrize("name", SAFE)
def test_a_release_with_a_known_hole_may_not_be_installed(name):
    lowest = [version for found, version in bounds() if found == name]
    assert lowest and min(lowest) >= Version(SAFE[name])
