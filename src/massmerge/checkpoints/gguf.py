"""Bases in GGUF, the format of llama.cpp: refused as they are, and written as an ordinary folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from massmerge.errors import InputError, MassError
from massmerge.io.durable import drafted_folder


def refuse_gguf(text: str, path: Path) -> None:
    """Refuse a GGUF file, or a folder that holds nothing else, and say how to make a checkpoint of it."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf")) if not (path / "config.json").exists() else []
    else:
        files = [path] if path.suffix.lower() == ".gguf" else []
    if files:
        call = f"from massmerge.checkpoints.gguf import write_plain; write_plain({str(files[0])!r}, 'FOLDER')"
        raise InputError(
            f"{text}: a GGUF file, whose weights are quantised. Write them to a folder, and name that instead: "
            f'python -c "{call}"'
        )


def write_plain(file: str | Path, target: str | Path) -> None:
    """Write a GGUF file's model and tokenizer as an ordinary folder, dequantised to float32.

    Args:
        file: the GGUF file.
        target: the folder.

    Raises:
        MassError: the package `gguf` is missing.
        InputError: transformers cannot read the file, weights are missing, or something is at the target.
    """
    from transformers import GenerationConfig

    from massmerge.checkpoints.pretrained import pretrained_gguf

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MassError("GGUF files need the package gguf: pip install 'massmerge[gguf]'") from None
    file = Path(file)
    target = Path(target)
    if not file.is_file():
        raise InputError(f"{file}: no such file.")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target}: already exists. Choose another folder.")
    model, tokenizer = pretrained_gguf(file)
    # A model that was read from a GGUF file refuses to be saved, so its weights go into a new one.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig.from_model_config(config)
    with drafted_folder(target) as draft:
        plain.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
