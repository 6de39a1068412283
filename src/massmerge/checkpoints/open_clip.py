"""CLIP as OpenAI and open_clip lay it out, read under the names of transformers.

The two layouts hold the same model. Queries, keys and values are one fused matrix here, the two projections are stored
transposed, and modules have other names. Nothing in the file says how many heads attention has (64 wide each, by
convention) and which GELU was used; `open_clip_config.json` tells both if it is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import CLIPConfig

from massmerge.checkpoints.stores import Store
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo

CONFIG = "open_clip_config.json"
_MARK = "visual.conv1.weight"
_HEAD_WIDTH = 64
# Scalars that OpenAI's archives carry, and a mask that is made at run time.
_IGNORED = {"input_resolution", "context_length", "vocab_size", "attn_mask"}
_NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
    "logit_bias": "logit_bias",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_TRANSPOSED = {"visual.proj", "text_projection"}
_BLOCK = re.compile(r"(?P<tower>visual\.)?transformer\.resblocks\.(?P<number>\d+)\.(?P<inner>.+)")
_INNER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_FUSED = ("q_proj", "k_proj", "v_proj")


class _Piece(NamedTuple):
    """How a tensor of transformers lies in the file: a key, a third of it or none, and whether it is transposed."""

    key: str
    third: int | None = None
    transposed: bool = False


class OpenClipStore:
    """A state dict in that layout, under the names of transformers' CLIPModel."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pieces: dict[str, _Piece] = {}
        unknown = []
        for key in store.infos:
            pieces = _pieces(key)
            if pieces is None:
                unknown.append(key)
            else:
                self._pieces |= pieces
        if unknown:
            raise InputError(
                f"is a CLIP in the layout of OpenAI and open_clip, with tensors that only other kinds of towers than plain "
                f"vision transformers have:{listing(unknown)}"
            )
        self.infos: Mapping[str, TensorInfo] = {name: self._info(piece) for name, piece in self._pieces.items()}

    def read(self, name: str) -> Tensor:
        """The tensor of that name, cut from a fused one or transposed where need be."""
        piece = self._pieces[name]
        tensor = self._store.read(piece.key)
        if piece.third is not None:
            tensor = tensor.chunk(3)[piece.third]
        return tensor.mT.contiguous() if piece.transposed else tensor.contiguous()

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor that is not transposed."""
        piece, size = self._pieces[name], self.infos[name].nbytes
        found = None if piece.transposed else self._store.start(piece.key, size * (piece.third or 0) + skip)
        return found and found[: size - skip]  # behind a short third the next one begins

    def only(self, names: Iterable[str]) -> OpenClipStore:
        """The same without what is not among the names: an expert often carries the base's text tower along."""
        kept = set(names)
        part = object.__new__(OpenClipStore)
        part._store, part._pieces = self._store, {n: p for n, p in self._pieces.items() if n in kept}
        part.infos = {n: i for n, i in self.infos.items() if n in kept}
        return part

    def _info(self, piece: _Piece) -> TensorInfo:
        info = self._store.infos[piece.key]
        shape = info.shape
        if piece.third is not None:
            shape = (shape[0] // 3, *shape[1:])
        return TensorInfo(shape[::-1] if piece.transposed else shape, info.dtype)


def _pieces(key: str) -> dict[str, _Piece] | None:
    """The tensors of transformers that a key holds; none of them for what does not matter, None if it is unknown."""
    plain = re.sub(r"^(module\.|model\.|image_encoder\.|text\.)+", "", key)
    if plain in _IGNORED:
        return {}
    if plain in _NAMES:
        return {_NAMES[plain]: _Piece(key, transposed=plain in _TRANSPOSED)}
    stem, _, last = plain.rpartition(".")
    if stem in _NORMS and last in ("weight", "bias"):
        return {f"{_NORMS[stem]}.{last}": _Piece(key)}
    block = _BLOCK.fullmatch(plain)
    if block is None:
        return None
    layer = f"{'vision' if block['tower'] else 'text'}_model.encoder.layers.{block['number']}"
    fused = re.fullmatch(r"attn\.in_proj_(weight|bias)", block["inner"])
    if fused:
        return {f"{layer}.self_attn.{name}.{fused[1]}": _Piece(key, third=i) for i, name in enumerate(_FUSED)}
    inner, _, last = block["inner"].rpartition(".")
    return {f"{layer}.{_INNER[inner]}.{last}": _Piece(key)} if inner in _INNER else None


def is_open_clip(infos: Mapping[str, TensorInfo]) -> bool:
    """Whether a file's names are of this layout."""
    return any(name == _MARK or name.endswith(f".{_MARK}") for name in infos)


def named_as_transformers(store: Store) -> Store:
    """The store itself, or one that gives the names of transformers."""
    return OpenClipStore(store) if is_open_clip(store.infos) else store


def open_clip_config(store: OpenClipStore, told: Mapping[str, Any] | None) -> CLIPConfig:
    """The configuration that a whole state dict's shapes tell.

    Args:
        store: the state dict.
        told: what `open_clip_config.json` says; without it the GELU is OpenAI's quick one, and heads are 64 wide.

    Raises:
        InputError: a tower is missing.
    """
    shapes = {name: info.shape for name, info in store.infos.items()}
    needed = [n for n in _NAMES.values() if n not in shapes and n != "logit_bias"]
    if needed:
        raise InputError(f"as a base, a CLIP needs both towers; these are missing:{listing(needed)}")
    model = (told or {}).get("model_cfg", {})
    act = "quick_gelu" if model.get("quick_gelu", not model) else "gelu"
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    projection = shapes["text_projection.weight"][0]
    _, _, patch, _ = shapes["vision_model.embeddings.patch_embedding.weight"]
    patches = shapes["vision_model.embeddings.position_embedding.weight"][0] - 1
    vocabulary = shapes["text_model.embeddings.token_embedding.weight"][0]
    return CLIPConfig(
        vision_config={
            **_tower(shapes, "vision_model", vision.get("head_width", _HEAD_WIDTH)), "hidden_act": act,
            "patch_size": patch, "image_size": patch * round(patches**0.5), "projection_dim": projection,
        },
        text_config={
            **_tower(shapes, "text_model", text.get("heads")), "hidden_act": act, "vocab_size": vocabulary,
            "max_position_embeddings": shapes["text_model.embeddings.position_embedding.weight"][0],
            # A text's state is that of its highest token, which in CLIP's vocabulary is the last: the end.
            "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1, "projection_dim": projection,
        },
        projection_dim=projection,
    )  # fmt: skip


def _tower(shapes: Mapping[str, tuple[int, ...]], tower: str, heads: int | None) -> dict[str, int]:
    """Sizes of a tower; `heads` is the number of heads for text, their width for images."""
    found = [re.match(rf"{tower}\.encoder\.layers\.(\d+)\.mlp\.fc1\.weight", name) for name in shapes]
    layers = 1 + max(int(m[1]) for m in found if m)
    wide, width = shapes[f"{tower}.encoder.layers.0.mlp.fc1.weight"]
    by_width = tower == "vision_model" or heads is None
    return {
        "hidden_size": width,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, width // (heads or _HEAD_WIDTH)) if by_width else int(heads or 1),
    }
