"""Makes the stored bundles of the current format: `python tests/golden/make.py`, once for a format version.

Those of a released version are never made again: every later reader must open these very bytes.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers as tf
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import massmerge  # noqa: E402
from massmerge.bundle.layout import FORMAT_VERSION  # noqa: E402
from massmerge.bundle.manifest import read_manifest  # noqa: E402
from massmerge.bundle.reader import Bundle  # noqa: E402
from massmerge.model.calibrate import calibrate  # noqa: E402

_TEXT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 40}  # fmt: skip
_IMAGE = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 32}  # fmt: skip
_T5 = {"vocab_size": 60, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2,
       "decoder_start_token_id": 0}  # fmt: skip
_WIDE = _TEXT | {"hidden_size": 24, "intermediate_size": 40}  # small matrices are kept in the base's type
BERT = (tf.BertForSequenceClassification, tf.BertConfig, _TEXT)
KINDS = {
    "text": (*BERT, {"merge": {"rank": 2}}),
    "calibrated": (*BERT, {"merge": {"rank": 2}}),
    "image": (tf.ViTForImageClassification, tf.ViTConfig, _IMAGE,
              {"merge": {"rank": 2}, "router": {"first_pass": "fixed", "site": "M1"}}),
    "generative": (tf.T5ForConditionalGeneration, tf.T5Config, _T5, {"merge": {"rank": 2}}),
    "static": (*BERT, {"merge": {"method": "tsv_m"}}),
    "float16": (*BERT[:2], _WIDE, {"merge": {"rank": 2, "factors": "float16"}}),
    "int8": (*BERT[:2], _WIDE, {"merge": {"rank": 2, "factors": "int8"}}),
    "layers": (*BERT, {"merge": {"rank": 2}}),
    "sharded": (*BERT, {"merge": {"rank": 2, "max_shard_size": "8KB"}}),
}  # fmt: skip
FORMATS = {"float16": 2, "int8": 2, "layers": 3, "sharded": 4}
"""The format that describes each kind; 1 where none stands here."""
ADDED = {"confidence"}
"""Keys of the manifest that came to a format later: its first readers pass over them, and its first bundles lack them."""
TASKS = ("a", "b", "c")


def make(kind: str, folder: Path) -> Path:
    """A bundle of one kind, in a folder of its own."""
    model, config, options, recipe = KINDS[kind]
    torch.manual_seed(0)
    base = model(config(**options))
    base.save_pretrained(folder / "base")
    for labels, task in enumerate(TASKS, 2):
        expert = model(config(**options, num_labels=labels))
        own = expert.state_dict()
        given = {n: t + 0.05 * torch.randn_like(t) for n, t in base.state_dict().items() if t.shape == own[n].shape}
        expert.load_state_dict(own | given)
        expert.save_pretrained(folder / task)
    named = {"base": "base", "tasks": [{"name": task, "expert": task} for task in TASKS], **recipe}
    if kind == "layers":
        for task, entry in zip(TASKS, named["tasks"], strict=True):
            torch.save(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).state_dict(),
                       folder / f"{task}.pt")  # fmt: skip
            entry["head"] = {"weights": f"{task}.pt", "labels": ["no", "yes"], "activation": "relu", "features": "cls"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(named, sort_keys=False))
    bundle = massmerge.merge(folder / "recipe.yaml", folder / "bundle", workers=1)
    if kind == "calibrated":
        calibrate(bundle, {task: inputs(kind, 6, 10 * i) for i, task in enumerate(TASKS)}, kind="prototype")
    return bundle


def inputs(kind: str, count: int = 4, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Ready inputs that no random generator has a part in."""
    if kind == "image":
        steps = torch.arange(3 * 16 * 16).reshape(3, 16, 16)
        return [{"pixel_values": torch.sin(steps * 0.37 * (first + i + 1))} for i in range(count)]
    return [{"input_ids": 3 + torch.arange(7) * (2 * (first + i) + 1) % 57} for i in range(count)]


def answers(kind: str, path: Path) -> list[dict[str, object]]:
    """What a bundle answers with each task given; routing may become better with every version."""
    model = massmerge.StaticModel(path) if kind == "static" else massmerge.load(path)
    if kind == "generative":
        written = [g for t in TASKS for g in model.generate(inputs(kind), task=t, max_new_tokens=4, do_sample=False)]
        return [{"task": one.task, "tokens": one.tokens} for one in written]
    found = [p for task in TASKS for p in model.predict(inputs(kind), task=task)]
    return [{"task": p.task, "label": p.label, "logit": p.logit} for p in found]


def layout(path: Path) -> dict[str, object]:
    """What a reader relies on: keys of the manifest, names of files, names and types of tensors."""
    manifest = read_manifest(path)
    about: dict[str, object] = {"manifest": sorted(manifest.keys() - ADDED), "files": sorted(manifest["files"])}
    if manifest["method"] != "mass":
        return about
    headers = Bundle(path).headers
    return about | {
        "task": sorted(manifest["tasks"][0]),
        "tensors": {task: {n: str(i.dtype) for n, i in sorted(h.items())} for task, h in headers.items()},
    }


def place(kind: str) -> Path:
    """Where the bundle of a kind is stored; its answers and layout beside."""
    return HERE / str(FORMATS.get(kind, 1)) / kind


def main() -> None:
    """Write every kind of the newest format, with its answers and its layout."""
    for kind in [kind for kind in KINDS if FORMATS.get(kind) == FORMAT_VERSION]:
        with TemporaryDirectory() as temporary:
            shutil.copytree(make(kind, Path(temporary)), place(kind))
        said = {"layout": layout(place(kind)), "answers": answers(kind, place(kind))}
        place(kind).with_suffix(".json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
