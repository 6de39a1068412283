"""One selected set as an ONNX file, checked with onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from massmerge.errors import InputError, MassError
from massmerge.model.export.checkpoint import copy_processor, task_names
from massmerge.model.export.parts import Part
from massmerge.model.export.sets import (
    Around,
    OpenBundle,
    bundle_output,
    last_state,
    random_inputs,
    relative_difference,
    set_model,
    write_labels,
)
from massmerge.model.heads.linear import LinearHead

MODEL = "model.onnx"


class _Outputs(nn.Module):
    """A model as a function from named tensors to one tensor: logits, an image's embedding, or the last hidden state."""

    def __init__(self, model: nn.Module, names: list[str], head: Around | LinearHead | None) -> None:
        super().__init__()
        self.model, self._names, self._head = model, names, head

    def forward(self, *tensors: Tensor) -> Tensor:
        """The model's output for tensors in the order of the names."""
        inputs = dict(zip(self._names, tensors, strict=True))
        output = self.model(**inputs, return_dict=True)
        if isinstance(self._head, LinearHead):
            return self._head.logits(output, inputs)
        found: Tensor = output.logits if self._head else last_state(output)
        return found


def write_onnx(opened: OpenBundle, positions: tuple[int, ...], folder: Path) -> Part:
    """Write the model of a set as `model.onnx`, and compare what onnxruntime makes of it with the bundle.

    Raises:
        InputError: a library is missing, or the model is no encoder.
        MassError: the exporter cannot do this architecture.
    """
    runtime = _onnxruntime()
    base = opened.model.core.base
    if getattr(base.config, "is_encoder_decoder", False):
        raise InputError(
            f"{opened.bundle.path}: an encoder-decoder answers by generating, which one ONNX file cannot. Use --to hf."
        )
    tasks = task_names(opened, positions)
    changes, around = opened.changes(positions), opened.around(tasks)
    linear = opened.linear(tasks)
    model = set_model(opened, changes, around)
    if getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = -1  # heads of the last token refuse batches without one
    inputs = random_inputs(base)
    _export(
        _Outputs(model, list(inputs), around or linear), inputs, folder / MODEL, _output_name(base, around or linear)
    )
    copy_processor(opened, folder)
    write_labels(opened, tasks, folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    # Another number of inputs, and of tokens, than it was exported with.
    others = {k: v[:, :5] if "input_ids" in inputs else v for k, v in random_inputs(base, 3).items()}
    session = runtime.InferenceSession(str(folder / MODEL), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: tensor.numpy() for name, tensor in others.items()})[0]
    wanted = bundle_output(opened, changes, tasks, others, logits=bool(around or linear))
    head = "inside" if around or linear else "none"
    return Part(", ".join(tasks), ".", relative_difference(torch.from_numpy(found), wanted), head=head)


def _output_name(base: nn.Module, head: Around | LinearHead | None) -> str:
    """What the tensor that comes out is called."""
    states = "image_embeds" if hasattr(base, "visual_projection") else "hidden_state"
    return "logits" if head else states


def _onnxruntime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError(f"--to onnx needs {error.name}: pip install 'massmerge[export]'.") from None
    return onnxruntime


def _export(model: nn.Module, inputs: dict[str, Tensor], path: Path, output: str) -> None:
    """Run the exporter, with the number of inputs and of tokens left open."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = tuple({0: batch} if t.is_floating_point() else {0: batch, 1: length} for t in inputs.values())
    try:
        with _quiet():
            torch.onnx.export(
                model, tuple(inputs.values()), str(path), dynamo=True, dynamic_shapes=(shapes,),
                input_names=list(inputs), output_names=[output], external_data=False, verbose=False,
            )  # fmt: skip
    except Exception as error:  # the exporter passes on whatever stops a trace
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise MassError(f"torch.onnx cannot export this architecture ({first}). Use --to hf.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its steps and warns of libraries that it could use."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
