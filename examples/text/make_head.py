"""Take an expert apart: its backbone alone, and its classifier as a file with a linear layer.

This stands for what you have when a head was trained by itself, on the features of a backbone.
"""

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoModel

EXAMPLE = Path("example")

AutoModel.from_pretrained(EXAMPLE / "spam").save_pretrained(EXAMPLE / "spam_backbone")
weights = load_file(EXAMPLE / "spam" / "model.safetensors")
head = {"weight": weights["classifier.weight"], "bias": weights["classifier.bias"]}
save_file(head, EXAMPLE / "spam_head.safetensors")
(EXAMPLE / "spam_labels.txt").write_text("ham\nspam\n", encoding="utf-8")
