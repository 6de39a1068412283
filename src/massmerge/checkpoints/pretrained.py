"""The one place that opens objects of transformers from files that others wrote: none of their code may run.

transformers runs code from a folder or from the hub where a configuration names some: a class in `auto_map`, a kernel that
implements attention. By default it asks on the terminal first, and takes the next line of standard input for the answer.
Here every file is checked before it is opened, nothing is ever trusted, and what transformers made of a configuration is
checked again before it builds a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from massmerge.checkpoints.stores import weight_files
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import read_header

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_IMAGE_CONFIGS = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")
CONFIGS = (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, *_IMAGE_CONFIGS)
"""The files that say which classes transformers makes, and how."""
_CODE = {
    "auto_map": "names classes of its own code",
    "trust_remote_code": "allows code of its own",
    "custom_generate": "names code of its own",
    "custom_pipelines": "names code of its own",
    "kernel_config": "names code to download",
    "attribute_map": "gives fields of the configuration other names",
    "quantization_config": "is for quantised weights, which cannot be merged and may need code to download",
}
# What transformers or torch bring along. Other names are kernels of the hub, or replaced by one where they are missing.
_BUILT_IN = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
_MOST_LABELS, _MOST_PARTS, _MOST_PIXELS = 1_000_000, 10_000, 10_000
_SIDES = ("height", "width", "shortest_edge")
_SPARE_NUMBERS = 1_000_000  # numbers that a model may have and its file lack, beside as many as the file has


def pretrained_config(folder: Path) -> PretrainedConfig:
    """The configuration in a folder.

    Raises:
        InputError: there is none, transformers cannot read it, or it names code.
    """
    refuse_code(folder, (CONFIG,))
    with in_words(folder / CONFIG, "configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _refuse(folder / CONFIG, faults_in(config))  # fields reach it from other files too
    return config


def pretrained_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder; errors as above."""
    from transformers import AutoTokenizer

    refuse_code(folder, (CONFIG, TOKENIZER_CONFIG))
    with in_words(folder, "tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def pretrained_image_processor(folder: Path) -> Any:
    """The image processor in a folder; errors as above."""
    from transformers import AutoImageProcessor

    refuse_code(folder, (CONFIG, *_IMAGE_CONFIGS))
    with in_words(folder, "image processor"):
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def pretrained_generation(folder: Path) -> transformers.GenerationConfig:
    """The `generation_config.json` in a folder; errors as above."""
    refuse_code(folder, (GENERATION_CONFIG,))
    with in_words(folder / GENERATION_CONFIG, "generation configuration"):
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


def pretrained_model(kind: type[Any], folder: Path) -> PreTrainedModel:
    """A model in float32 that is ready to run, of a class or of the one that `AutoModel` chooses; errors as above."""
    config = pretrained_config(folder)
    refuse_code(folder, (GENERATION_CONFIG,))
    if (folder / "adapter_config.json").exists():  # transformers would load the base that it names
        raise InputError(f"{folder}: has an adapter_config.json beside its model. Remove it if you know the model.")
    _refuse_size(kind, config, folder)
    with in_words(folder, "model"), _in_silence():
        return kind.from_pretrained(
            folder, config=config, dtype=torch.float32, trust_remote_code=False, local_files_only=True, use_safetensors=True
        ).eval()  # fmt: skip


def pretrained_adapter(peft: Any, model: PreTrainedModel, folder: Path) -> Any:
    """What PEFT makes of a model and the adapter that was just written for it."""
    return peft.PeftModel.from_pretrained(model, folder).eval()


def model_class(name: str) -> type[PreTrainedModel]:
    """The class of that name, which must be one of transformers' models.

    Raises:
        InputError: there is none.
    """
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise InputError(f"transformers {transformers.__version__} has no model class {name}")
    return found


def empty_model(config: PretrainedConfig, kind: type[Any] = AutoModel) -> PreTrainedModel:
    """A model without weights, of a class or of the one that `AutoModel` chooses.

    Raises:
        InputError: the configuration names code, or transformers cannot build the model.
    """
    name = config.model_type if kind is AutoModel else kind.__name__
    _refuse(f"a {name}", faults_in(config))
    try:
        with torch.device("meta"), _in_silence():  # a class that is only tried has nothing to say
            if kind is AutoModel:
                return AutoModel.from_config(config, trust_remote_code=False)
            return kind(config)
    except Exception as error:  # configurations that do not fit fail in all ways
        raise InputError(f"transformers cannot build {name}: {_first_line(error)}") from None


def refuse_code(folder: Path, names: Sequence[str] = CONFIGS) -> None:
    """Raise an error if one of these files names code, or sizes that no model has.

    Raises:
        InputError: it names the file and says what to do.
    """
    for name in names:
        path = folder / name
        if path.is_file():
            _refuse(path, faults_in(_read(path)))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None  # damaged: nothing comes of it, and who opens it will say so


def _refuse(where: Path | str, faults: Iterator[str]) -> None:
    found = list(dict.fromkeys(faults))
    if found:
        raise InputError(
            f"{where}: refused:{listing(found)}\n"
            "  massmerge runs no code from models and bounds their size. Remove the fields if the model works without."
        )


def faults_in(value: Any) -> Iterator[str]:
    """What is wrong with a configuration, as JSON or as an object: fields that name code, and sizes that no model has."""
    if isinstance(value, PretrainedConfig):
        value = vars(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _field_faults(str(key), inner)
            yield from faults_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from faults_in(inner)


def _field_faults(key: str, value: Any) -> Iterator[str]:
    if key in _CODE and value and (value is True or isinstance(value, Mapping | list | tuple | str)):
        yield f"`{key}` {_CODE[key]}"
    built_in = _BUILT_IN.get(key.removeprefix("_").removesuffix("_internal"))
    for choice in value.values() if isinstance(value, Mapping) else [value]:
        if built_in and choice is not None and choice not in built_in:
            yield f"`{key}` is {choice!r}, which may be code to download; there are {', '.join(built_in)}"
    if isinstance(value, int | float) and value > _limit(key):
        yield f"`{key}` is {value:,}, and at most {_limit(key):,} can be"


def _limit(key: str) -> float:
    """The largest number that a field may hold, where transformers would make as many things as it says."""
    if key == "num_labels":
        return _MOST_LABELS
    if "layer" in key or "depth" in key:
        return _MOST_PARTS
    return _MOST_PIXELS if key in _SIDES else math.inf


def _refuse_size(kind: type[Any], config: PretrainedConfig, folder: Path) -> None:
    """Refuse a configuration of a much larger model than its file holds: what the file lacks would be allocated."""
    held = sum(math.prod(info.shape) for path in weight_files(folder) for info in read_header(path).values())
    model = empty_model(config, kind)
    wanted = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if wanted > 2 * held + _SPARE_NUMBERS:
        raise InputError(
            f"{folder / CONFIG}: describes a model of {wanted:,} numbers, but its file holds {held:,}. "
            "Download or save it again."
        )


@contextmanager
def in_words(where: Path | str, what: str) -> Iterator[None]:
    """Whatever a library says of a file that it cannot read, as an error of ours."""
    try:
        yield
    except (InputError, MemoryError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError):
        raise
    except BaseException as error:  # libraries in Rust raise panics, which are no `Exception`
        raise InputError(f"{where}: transformers cannot read this {what} ({_first_line(error)}).") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


@contextmanager
def _in_silence() -> Iterator[None]:
    """Without transformers' bar and its warnings, such as that of a pooler that no file has, which is dropped again."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
