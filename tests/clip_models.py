"""Tiny CLIP and SigLIP models: in the layout of transformers, and in that of OpenAI and open_clip with a plain forward."""

import math
import struct
import zlib
from pathlib import Path

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from massmerge.cli.demo.example import CLIP_VOCABULARY, write_clip_processor
from massmerge.io.tensor_file import TensorInfo, header_bytes

CLASSES = ["cat", "dog", "red car"]
WORDS = len(CLIP_VOCABULARY)
_TOWER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 96}
_VISION = {**_TOWER, "image_size": 32, "patch_size": 8}
_TEXT = {**_TOWER, "hidden_size": 64, "vocab_size": WORDS, "max_position_embeddings": 77}


def make_clip(kind: str = "clip") -> tf.PreTrainedModel:
    """A whole model of two towers."""
    torch.manual_seed(7)
    ends = {"bos_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "pad_token_id": 1}
    if kind == "siglip":
        config = tf.SiglipConfig(vision_config=_VISION, text_config={**_TEXT, "projection_size": 64, **ends})
        model = tf.SiglipModel(config)
        with torch.no_grad():
            model.logit_scale.fill_(math.log(10.0))
            model.logit_bias.fill_(-2.5)
    else:
        vision, text = {**_VISION, "projection_dim": 24}, {**_TEXT, "projection_dim": 24, **ends}
        model = tf.CLIPModel(tf.CLIPConfig(vision_config=vision, text_config=text, projection_dim=24))
    with torch.no_grad():  # the classes' own start has near-zero deltas between inputs
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model.eval()


def write_clip(folder: Path, kind: str = "clip", tasks: tuple[str, ...] = ("pets", "cars")) -> Path:
    """A base of two towers with its processor, and for each task a fine-tuned vision tower; returns the folder."""
    base = make_clip(kind)
    base.save_pretrained(folder / "base")
    write_clip_processor(folder / "base")
    for seed, task in enumerate(tasks):
        shifted(base.vision_model, seed).save_pretrained(folder / task)
    return folder


@torch.no_grad()
def shifted(model: nn.Module, seed: int) -> nn.Module:
    """The same model with every parameter moved."""
    torch.manual_seed(100 + seed)
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    for parameter in copy.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.03)
    return copy


def write_headers(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of these shapes; its data is a hole but for the first number of each tensor, which is its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    infos = {name: TensorInfo(tuple(shape), torch.float32) for name, shape in shapes.items()}
    own = struct.pack("f", 1 + zlib.crc32(str(path).encode()) / 2**32)
    with path.open("wb") as file:
        end = file.write(header_bytes(infos))
        for info in infos.values():
            file.seek(end)
            file.write(own)
            end += info.nbytes
        file.truncate(end)


class OpenClip(nn.Module):
    """CLIP in the layout of OpenAI and open_clip, its forward written out plainly."""

    def __init__(self, width=64, wide=96, layers=2, text_layers=2, patch=8, side=32, embed=24):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.zeros(width))
        self.visual.positional_embedding = nn.Parameter(torch.empty((side // patch) ** 2 + 1, width))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.proj = nn.Parameter(torch.empty(width, embed))
        self.visual.transformer = self._blocks(width, wide, layers)
        self.transformer = self._blocks(width, wide, text_layers)
        self.token_embedding = nn.Embedding(WORDS, width)
        self.positional_embedding = nn.Parameter(torch.empty(77, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed))
        self.logit_scale = nn.Parameter(torch.tensor(3.0))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim:
                    noise = torch.randn_like(parameter)
                    parameter.copy_(parameter + noise * 0.1 if parameter.ndim == 1 else noise * 0.15)

    @staticmethod
    def _blocks(width: int, wide: int, layers: int) -> nn.Module:
        tower = nn.Module()
        tower.resblocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.ln_1, block.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            block.attn = nn.MultiheadAttention(width, 1, batch_first=True)
            block.mlp = nn.Module()
            block.mlp.c_fc, block.mlp.c_proj = nn.Linear(width, wide), nn.Linear(wide, width)
            tower.resblocks.append(block)
        return tower

    @staticmethod
    def _run(tower: nn.Module, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in tower.resblocks:
            y = block.ln_1(x)
            x = x + block.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
            y = block.mlp.c_fc(block.ln_2(x))
            x = x + block.mlp.c_proj(y * torch.sigmoid(1.702 * y))
        return x

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        patches = self.visual.conv1(pixels).flatten(2).mT
        start = self.visual.class_embedding.expand(len(pixels), 1, -1)
        x = torch.cat([start, patches], 1) + self.visual.positional_embedding
        x = self._run(self.visual.transformer, self.visual.ln_pre(x))
        return self.visual.ln_post(x[:, 0]) @ self.visual.proj

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.token_embedding(ids) + self.positional_embedding[:length]
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.ln_final(self._run(self.transformer, x, mask))
        return x[torch.arange(len(ids)), ids.argmax(1)] @ self.text_projection


@torch.inference_mode()
def naive_head(encode_text, tokenizer, scale: float, classes: list[str], templates: list[str]) -> torch.Tensor:
    """A head of texts, one text at a time."""
    rows = []
    for name in classes:
        total = 0
        for template in templates:
            ids = torch.tensor([tokenizer(template.replace("{}", name))["input_ids"]])
            total = total + F.normalize(encode_text(ids), dim=-1)[0]
        rows.append(F.normalize(total / len(templates), dim=-1) * scale)
    return torch.stack(rows)
