"""What people hand in, as the tensors that a backbone takes: text, pairs, images, paths, arrays, ready tensors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import PretrainedConfig

from massmerge.checkpoints.pretrained import in_words, pretrained_image_processor, pretrained_tokenizer
from massmerge.checkpoints.sources import PROCESSOR_FILES
from massmerge.errors import InputError
from massmerge.model.chat import Message, is_conversation, is_message, last_turn, render

MAX_PIXELS = 100_000_000
_TEXT_LIMIT = 10_000_000  # characters; longer ones would stall the tokenizer before it truncates
_CHARACTERS = 100  # a token; the longest word that WordPiece takes
_MOST_CHARACTERS = 1_000_000  # of a backbone without a limit of positions
Row = dict[str, Tensor]
_NAME_ONE = "Name one in the recipe (`processor:`) and merge again, or hand in ready tensors."


class CutRow(Row):
    """The row of a text whose end did not fit.

    Attributes:
        length: how many tokens the whole text has; at least, where that is not counted.
    """

    length = 0

    @classmethod
    def of(cls, row: Row, length: int) -> CutRow:
        """A row that is what is left of so many tokens."""
        cut = cls(row)
        cut.length = length
        return cut


class ChatRow(Row):
    """The row of a conversation of several turns.

    Attributes:
        turn: the row of the last turn alone.
    """

    turn: Row

    @classmethod
    def of(cls, row: Row, turn: Row) -> ChatRow:
        """A conversation with its last turn."""
        chat = cls(row)
        chat.turn = turn
        return chat


class Batch(dict[str, Tensor]):
    """Inputs as tensors.

    Attributes:
        turns: of inputs that are conversations of several turns, their positions and the last turns alone as a batch.
    """

    turns: tuple[list[int], dict[str, Tensor]] | None = None


class InputReader:
    """Turns inputs into rows of tensors, and rows into batches.

    Args:
        folder: the bundle's processor folder; without one only ready tensors are taken.
        config: the backbone's configuration.
        image: whether the backbone takes images.
        attempt: runs the backbone on one image; ready tensors of a size that it has not seen are tried so.
        seen: the shape of an image that it has seen.
    """

    def __init__(
        self,
        folder: Path,
        config: PretrainedConfig,
        *,
        image: bool,
        attempt: Callable[[Row], object] | None = None,
        seen: torch.Size | None = None,
    ) -> None:
        self.folder, self._config, self.image, self._attempt = folder, config, image, attempt
        self._fitting = {seen}
        self._processor: Any = None
        self._lock = threading.Lock()  # a tokenizer cannot serve two threads at once
        self._said_truncated = False

    def row(self, item: Any) -> Row:
        """One input as tensors without a batch dimension.

        Raises:
            InputError: it cannot be read as an input of this model; the message says what and what to do.
        """
        if isinstance(item, Mapping):
            row = self._ready({k: torch.as_tensor(v) for k, v in item.items()})
            return CutRow.of(row, item.length) if isinstance(item, CutRow) else row
        if self.image:
            return {"pixel_values": self._pixels(item)}
        if is_conversation(item):
            return self._conversation(item)
        return self._tokens(item)

    def batch(self, rows: list[Row], *, left: bool = False) -> dict[str, Tensor]:
        """Rows as one batch; text is padded to the longest on the right, or on the left for those who write on from it."""
        if self.image:
            pixels = [row["pixel_values"] for row in rows]
            sizes = {f"{p.shape[2]}×{p.shape[1]}" for p in pixels}
            if len(sizes) > 1:
                raise InputError(
                    f"images of {' and '.join(sorted(sizes))} pixels do not fit into one batch. Scale them to one size, or "
                    "use batch_size=1."
                )
            return {"pixel_values": torch.stack(pixels)}
        longest = max(row["input_ids"].shape[0] for row in rows)
        pad = getattr(self._config, "pad_token_id", None) or 0
        fill = {"input_ids": pad}
        names = dict.fromkeys(name for row in rows for name in row)
        none = torch.zeros(0, dtype=torch.long)  # e.g. ready tensors without token types beside text that has them
        return {
            n: torch.stack([_padded(row.get(n, none), longest, fill.get(n, 0), left=left) for row in rows])
            for n in names
        }

    def _ready(self, row: Row) -> Row:
        wanted = "pixel_values" if self.image else "input_ids"
        if wanted not in row:
            raise InputError(
                f"ready tensors must hold {wanted!r}; these hold {', '.join(map(repr, row)) or 'nothing'}."
            )
        if self.image:
            return {"pixel_values": self._checked_pixels(row["pixel_values"])}
        self._refuse_tokens(row)
        row = {"attention_mask": torch.ones_like(row["input_ids"]), **row}
        return {name: tensor.long() for name, tensor in row.items()}

    def _refuse_tokens(self, row: Row) -> None:
        """Refuse what the backbone would fail on, or take for something else."""
        ids, limit = row["input_ids"], positions(self._config)
        if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32) or ids.numel() == 0:
            raise InputError(
                f"input_ids must be whole numbers of shape (tokens,); these are {ids.dtype} {tuple(ids.shape)}."
            )
        if len(ids) > limit:
            raise InputError(f"{len(ids)} tokens; the backbone has positions for at most {limit}. Cut them.")
        vocabulary = self._config.vocab_size
        bounds = {"input_ids": vocabulary, "attention_mask": 2,
                  "token_type_ids": getattr(self._config, "type_vocab_size", vocabulary)}  # fmt: skip
        for name, tensor in row.items():
            if name not in bounds:
                raise InputError(f"{name}: not read here. Leave it out.")
            if tensor.shape != ids.shape or tensor.is_floating_point() or tensor.is_complex():
                raise InputError(f"{name}: must be whole numbers of the shape of input_ids, {tuple(ids.shape)}.")
            if int(tensor.min()) < 0 or int(tensor.max()) >= bounds[name]:
                raise InputError(f"{name} must lie between 0 and {bounds[name] - 1}.")

    # Text

    def _conversation(self, messages: Sequence[Message]) -> Row:
        row = self._tokens(render(self.processor, messages), special=False)
        last = last_turn(messages)
        if last is None or isinstance(row, CutRow):
            return row
        return ChatRow.of(row, self._tokens(render(self.processor, last), special=False))

    def _tokens(self, item: Any, *, special: bool = True) -> Row:
        pair = (
            isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(part, str) for part in item)
        )  # e.g. premise and hypothesis
        if not isinstance(item, str) and not pair:
            raise InputError(f"this model takes text or pairs of texts, not {_kind(item)}.")
        texts = list(item) if pair else [item]
        if not any(text.strip() for text in texts):
            raise InputError("empty text.")
        if any(len(text) > _TEXT_LIMIT for text in texts):
            raise InputError(f"text of more than {_TEXT_LIMIT:,} characters. Split it.")
        tokenizer = self.processor
        with in_words("input", "text"):
            limit = max(1, min(tokenizer.model_max_length, positions(self._config)))
        room = min(_CHARACTERS * limit, _MOST_CHARACTERS)
        cut = any(len(text) > room for text in texts)
        # A tokenizer takes 360 bytes a character before it truncates, so nothing that cannot fit is given to it.
        texts = [_shortened(text, room, left=tokenizer.truncation_side == "left") for text in texts]
        if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
            raise InputError("the text holds bytes that are not UTF-8. Read it in its own encoding.")
        with self._lock, in_words("input", "text"):
            encoded = tokenizer(*texts, truncation=True, max_length=limit, add_special_tokens=special)
            row = {k: torch.tensor(v) for k, v in encoded.items() if isinstance(v, list)}
            length = row["input_ids"].shape[0]
            if length >= limit:
                length = len(tokenizer(*texts, add_special_tokens=special)["input_ids"])
                cut = cut or length > limit
        if cut and not self._said_truncated:
            self._said_truncated = True
            warnings.warn(f"text of more than {limit} tokens was truncated (said once)", stacklevel=2)
        if row["input_ids"].numel() == 0:
            raise InputError("the tokenizer finds no token in this text.")
        if int(row["input_ids"].max()) >= self._config.vocab_size:
            raise InputError("the tokenizer is not the base's: it has more tokens. Merge again with the base's own.")
        row = _once_begun({k: v.long() for k, v in row.items()}, tokenizer.bos_token_id)
        return CutRow.of(row, length) if cut else row

    @property
    def has_processor(self) -> bool:
        """Whether there is a tokenizer or image processor."""
        return self._processor is not None or any((self.folder / name).is_file() for name in PROCESSOR_FILES)

    @property
    def processor(self) -> Any:
        """The tokenizer or image processor, loaded when first needed.

        Raises:
            InputError: the bundle has none.
        """
        if self._processor is None:
            kind = "image processor" if self.image else "tokenizer"
            try:
                if not self.folder.is_dir():
                    raise InputError("there is no processor folder.")
                self._processor = (pretrained_image_processor if self.image else pretrained_tokenizer)(self.folder)
            except InputError as error:
                raise InputError(f"the bundle has no {kind} that can be loaded: {error} {_NAME_ONE}") from None
        return self._processor

    def text(self, tokens: list[int]) -> str:
        """The text of tokens, without those that are no text."""
        with self._lock:
            found: str = self.processor.decode(tokens, skip_special_tokens=True)
        return found

    # Images

    def _pixels(self, item: Any) -> Tensor:
        if isinstance(item, Tensor):
            return self._checked_pixels(item)
        image = _open_image(item)
        processor = self.processor
        with in_words("input", "image"):
            pixels = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return self._checked_pixels(pixels)

    def _checked_pixels(self, pixels: Tensor) -> Tensor:
        channels = getattr(self._config, "num_channels", 3)
        if pixels.ndim != 3 or pixels.shape[0] != channels or not pixels.is_floating_point():
            raise InputError(
                f"a ready image is a floating-point tensor ({channels}, height, width); this is {pixels.dtype} "
                f"{tuple(pixels.shape)}."
            )
        if not bool(torch.isfinite(pixels).all()):
            raise InputError("the tensor holds NaN or infinity.")
        pixels = pixels.float()
        if self._attempt is not None and pixels.shape not in self._fitting:
            try:
                self._attempt({"pixel_values": pixels[None]})
            except (ValueError, RuntimeError) as error:
                raise InputError(f"a tensor {tuple(pixels.shape)} does not fit the backbone: {error}") from None
            self._fitting.add(pixels.shape)
        return pixels


def _open_image(item: Any) -> Image.Image:
    """An image in RGB; its size is looked at before a pixel is decoded."""
    where = ""
    try:
        if isinstance(item, str | Path):
            where = f"{item}: "
            if Path(item).is_file() and Path(item).stat().st_size == 0:
                raise InputError(f"{where}the file is empty.")
            item = Image.open(item)
        elif isinstance(item, np.ndarray):
            if item.dtype != np.uint8:
                raise InputError(f"an array must hold bytes (uint8) of shape (height, width, 3); this is {item.dtype}.")
            item = Image.fromarray(item)
        if not isinstance(item, Image.Image):
            raise InputError(f"this model takes images or paths of images, not {_kind(item)}.")
        if not item.width * item.height:
            raise InputError(f"{where}an image of {item.width}×{item.height} pixels has nothing to see.")
        if item.width * item.height > MAX_PIXELS:
            raise InputError(
                f"{where}{item.width}×{item.height} pixels; at most {MAX_PIXELS:,} are decoded. Scale it down."
            )
        return ImageOps.exif_transpose(item).convert("RGB")  # as cameras mean it, and as transformers reads it
    except FileNotFoundError:
        raise InputError(f"{where}no such file.") from None
    except Image.DecompressionBombError:
        raise InputError(f"{where}too many pixels; at most {MAX_PIXELS:,} are decoded. Scale it down.") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"{where}not a readable image ({error}).") from None


def _shortened(text: str, room: int, *, left: bool) -> str:
    """The end of a text that a tokenizer would keep; blanks would take the room of words."""
    if len(text) <= room:
        return text
    return text.rstrip()[-room:] if left else text.lstrip()[:room]


def _once_begun(row: Row, begin: int | None) -> Row:
    """A row without its first token where that is the begin token twice: one is of the text, as templates write it."""
    ids = row["input_ids"]
    twice = begin is not None and len(ids) > 1 and int(ids[0]) == int(ids[1]) == begin
    return {name: values[1:] for name, values in row.items()} if twice else row


def _padded(values: Tensor, length: int, fill: int, *, left: bool) -> Tensor:
    room = length - values.shape[0]
    return torch.nn.functional.pad(values, (room, 0) if left else (0, room), value=fill)


def several(inputs: Any) -> Iterable[Any]:
    """One input as a list of one; a pair of strings given alone is two inputs, not a pair. Messages are one conversation."""
    if is_message(inputs):
        return [[inputs]]
    if is_conversation(inputs):
        return [inputs]
    if isinstance(
        inputs, Mapping
    ):  # ready tensors; a tokenizer or image processor gives those of several inputs together
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        several = {"input_ids": 2, "pixel_values": 4}
        if any(tensor.ndim == several.get(name) for name, tensor in tensors.items()):
            if len({len(tensor) for tensor in tensors.values()}) > 1:
                shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
                raise InputError(f"tensors of different numbers of inputs: {shapes}. All must have as many rows.")
            return [dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)]
        return [inputs]
    if isinstance(inputs, Tensor | np.ndarray):
        return [inputs] if inputs.ndim in (0, 2, 3) else list(inputs)
    single = isinstance(inputs, str | bytes | Path | Image.Image) or not isinstance(inputs, Iterable)
    return [inputs] if single else inputs


def read_batches(
    inputs: Iterable[Any], size: int, read: Callable[[Any], Row], on_error: str = "raise"
) -> Iterator[list[Row | InputError]]:
    """Inputs as rows of tensors, so many at a time; with `row`, the error itself where one cannot be read."""
    if on_error not in ("raise", "row"):
        raise InputError(f"on_error is 'raise' or 'row', not {on_error!r}.")
    if size < 1:
        raise InputError("batch_size must be at least 1.")
    items = iter(inputs)
    while chunk := list(islice(items, size)):
        yield [_attempt(read, item, on_error) for item in chunk]


def _attempt(read: Callable[[Any], Row], item: Any, on_error: str) -> Row | InputError:
    """An input as tensors; with `row`, the error where it cannot be read."""
    try:
        if isinstance(item, Exception):
            raise item
        return read(item)
    except InputError as error:
        if on_error == "raise":
            raise
        return error


def positions(config: PretrainedConfig) -> int:
    """How many tokens the backbone has positions for; RoBERTa's start behind its padding token."""
    count = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if count is None:
        return 1_000_000
    return count - (config.pad_token_id or 0) - 1 if "roberta" in config.model_type else count


def _kind(item: Any) -> str:
    return f"{type(item).__module__}.{type(item).__name__}".removeprefix("builtins.")
