"""The one place that opens objects of transformers from files that others wrote: none of their code may run.

transformers runs code from a folder or from the hub where a configuration names some: a class in `auto_map`, a kernel that
implements attention. By default it asks on the terminal first, and takes the next line of standard input for the answer.
Here every file is checked before it is opened, nothing is ever trusted, and what transformers made of a configuration is
checked again before it builds a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from massmerge.io.untrusted import (
    CONFIG,
    GENERATION_CONFIG,
    IMAGE_CONFIGS,
    TOKENIZER_CONFIG,
    faults_in,
    refuse,
    refuse_code,
)

_SPARE_NUMBERS = 1_000_000  # numbers that a model may have and its file lack, beside as many as the file has


def pretrained_config(folder: Path) -> PretrainedConfig:
    """The configuration in a folder.

    Raises:
        InputError: there is none, transformers cannot read it, or it names code.
    """
    refuse_code(folder, (CONFIG,))
    with in_words(folder / CONFIG, "configuration"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        refuse(folder / CONFIG, faults_in(config))  # fields reach it from other files too
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

    refuse_code(folder, (CONFIG, *IMAGE_CONFIGS))
    with in_words(folder, "image processor"):
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def pretrained_generation(folder: Path) -> transformers.GenerationConfig:
    """The `generation_config.json` in a folder; errors as above."""
    refuse_code(folder, (GENERATION_CONFIG,))
    with in_words(folder / GENERATION_CONFIG, "generation configuration"):
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


def pretrained_model(kind: type[Any], folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model that is ready to run, of a class or of the one that `AutoModel` chooses; errors as above."""
    config = pretrained_config(folder)
    refuse_code(folder, (GENERATION_CONFIG,))
    if (folder / "adapter_config.json").exists():  # transformers would load the base that it names
        raise InputError(f"{folder}: has an adapter_config.json beside its model. Remove it if you know the model.")
    held = sum(math.prod(info.shape) for path in weight_files(folder) for info in read_header(path).values())
    _refuse_size(kind, config, folder / CONFIG, held)
    with in_words(folder, "model"), _in_silence():
        return kind.from_pretrained(
            folder, config=config, dtype=dtype, trust_remote_code=False, local_files_only=True, use_safetensors=True
        ).eval()  # fmt: skip


def pretrained_gguf(file: Path) -> tuple[PreTrainedModel, Any]:
    """The model that writes and the tokenizer of a GGUF file, whose weights become float32; errors as above."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = file.parent
    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    refuse_code(folder, (CONFIG, TOKENIZER_CONFIG, GENERATION_CONFIG))  # which transformers would read beside it
    with in_words(file, "GGUF file"), _in_silence():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **given)
        refuse(file, faults_in(config))
        _refuse_size(AutoModel, config, file, _gguf_numbers(file))
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False, **given
        )
        if lost := sorted(said["missing_keys"]):  # which transformers would fill with random numbers
            raise InputError(f"{file}: weights are missing:{listing(lost)}\n  Download it again.")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **given)
    return model, tokenizer


def _gguf_numbers(file: Path) -> int:
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


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
    refuse(f"a {name}", faults_in(config))
    try:
        with torch.device("meta"), _in_silence():  # a class that is only tried has nothing to say
            if kind is AutoModel:
                return AutoModel.from_config(config, trust_remote_code=False)
            return kind(config)
    except Exception as error:  # configurations that do not fit fail in all ways
        raise InputError(f"transformers cannot build {name}: {_first_line(error)}") from None


def _refuse_size(kind: type[Any], config: PretrainedConfig, where: Path, held: int) -> None:
    """Refuse a configuration of a much larger model than its file holds: what the file lacks would be allocated."""
    model = empty_model(config, kind)
    wanted = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if wanted > 2 * held + _SPARE_NUMBERS:
        raise InputError(
            f"{where}: describes a model of {wanted:,} numbers, but its file holds {held:,}. Download or save it again."
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
