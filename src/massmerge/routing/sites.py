"""Places in the network where inputs can be routed, found by tracing a probe forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from massmerge.errors import InputError

_LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Site:
    """The input shared by one or more linear layers."""

    name: str
    """`A9` and `O9` for what attention of block 9 reads and what its output layer reads, `M9` and `D9` for the MLP and its
    output layer; else the path of its first layer."""
    modules: tuple[str, ...]
    """Paths of the linear layers that read this input, in the order of their calls."""
    width: int
    depth: float
    """Share of the linear layers' work that lies before it, from 0 to 1: what a first pass up to here costs."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the weights that read this input."""
        return tuple(f"{module}.weight" for module in self.modules)


def routed_part(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The part of a model that reads the prompt, with the prefix of its names: the encoder, or all of it."""
    if getattr(model.config, "is_encoder_decoder", False):
        return _with_prefix(model, model.get_encoder())
    return "", model


def _with_prefix(model: PreTrainedModel, part: nn.Module) -> tuple[str, nn.Module]:
    return next(f"{path}." for path, module in model.named_modules() if module is part), part


def probe_inputs(model: PreTrainedModel, batch: int = 1) -> dict[str, Tensor]:
    """A smallest input of the right shape; its values do not matter."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.zeros(shape, device=model.device, dtype=model.dtype)}
    ids = torch.arange(4, device=model.device).repeat(batch, 1) % max(1, getattr(config, "vocab_size", 4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def watched_sites(
    model: PreTrainedModel, part: tuple[str, nn.Module] | None = None
) -> Iterator[Callable[[], list[Site]]]:
    """Watch a forward pass that is made inside; afterwards the function gives the sites that it came to, in order.

    Args:
        model: what runs.
        part: the part of it that is watched, with the prefix of its names; what reads the prompt by default.
    """
    prefix, watched = part or routed_part(model)
    calls: list[tuple[str, nn.Module, Tensor]] = []

    def note(path: str, module: nn.Module) -> Any:
        """Watch what a module reads."""
        return module.register_forward_pre_hook(lambda _, args: calls.append((path, module, args[0])))

    handles = [note(prefix + path, m) for path, m in watched.named_modules() if isinstance(m, _LINEAR)]
    try:
        yield lambda: _named(_grouped(calls))
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def find_sites(model: PreTrainedModel) -> list[Site]:
    """Every place where linear layers read an activation, in the order in which a forward pass comes to them."""
    with watched_sites(model) as sites:
        # Without a mask: its values would be looked at, and a skeleton on the meta device has none.
        routed_part(model)[1](**{k: v for k, v in probe_inputs(model).items() if k != "attention_mask"})
    return sites()


@torch.inference_mode()
def find_decoder_sites(model: PreTrainedModel) -> list[Site]:
    """The same of an encoder-decoder's decoder, where its first token is written; none of other models."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    ids = probe_inputs(model)["input_ids"]
    with watched_sites(model, _with_prefix(model, model.get_decoder())) as sites:
        model(input_ids=ids, decoder_input_ids=ids[:, :1])
    return sites()


def _grouped(calls: list[tuple[str, nn.Module, Tensor]]) -> list[tuple[list[str], int, float]]:
    """Layers that read the very same tensor are one site; a layer called again (shared blocks) counts at its first call."""
    groups: list[tuple[list[str], Tensor, float]] = []
    seen: set[str] = set()
    work = 0.0
    for path, module, tensor in calls:
        if path in seen:
            continue
        seen.add(path)
        same = next((g for g in groups if g[1] is tensor), None)
        if same is None:
            groups.append(([path], tensor, work))
        else:
            same[0].append(path)
        work += sum(p.numel() for p in module.parameters()) * tensor[..., 0].numel()
    return [(paths, tensor.shape[-1], before / max(work, 1.0)) for paths, tensor, before in groups]


def _named(groups: list[tuple[list[str], int, float]]) -> list[Site]:
    """Short names: the first two inputs of attention and of the MLP in each numbered block."""
    sites: list[Site] = []
    taken: set[str] = set()
    for paths, width, depth in groups:
        block = re.match(r"(?:.*?\.)?(\d+)\.(.+)", paths[0])
        name = paths[0]
        if block:
            # Every attention module in use has "att" in its path below the block, no MLP has.
            letters = "AO" if "att" in block[2].lower() else "MD"
            name = next((short for letter in letters if (short := letter + block[1]) not in taken), name)
        taken.add(name)
        sites.append(Site(name, tuple(paths), width, depth))
    return sites


IMAGE_KINDS = ("O", "M", "A")
_TEXT_KINDS = ("MO", "O", "M", "A")


def choose_sites(
    sites: list[Site],
    wanted: str | list[str],
    covered: Callable[[Site], int] = lambda site: 1,
    *,
    half: bool = False,
    kinds: Sequence[str] = (),
) -> list[Site]:
    """The sites that vote.

    Args:
        sites: all of them, in order.
        wanted: names or module paths, or `auto`: the best by the measurements in docs/routing.md; other ones if more tasks
            change something there (adapters often touch nothing but queries and values).
        covered: how many tasks change something at a site.
        half: only the first half of the blocks, which is enough for most images.
        kinds: groups of kinds of sites that `auto` chooses among, by letters, the best first; the usual ones by default.

    Raises:
        InputError: there is no such site.
    """
    if wanted == "auto":
        usual = IMAGE_KINDS if half else _TEXT_KINDS
        groups = [_group(sites, letters, half=half) for letters in (kinds or usual)]
        return max(
            [group for group in groups if group] or [sites[: max(1, len(sites) // 2)]],
            key=lambda group: min(covered(site) for site in group),
        )
    by_name: Mapping[str, Site] = {n: site for site in sites for n in (site.name, *site.modules, *site.tensors)}
    names = [wanted] if isinstance(wanted, str) else wanted
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join(site.name for site in sites if len(site.name) <= 4)
        raise InputError(
            f"no site {', '.join(map(repr, unknown))}. Choose from {known}; `mass inspect --sites` lists all."
        )
    chosen = {by_name[name].name for name in names}
    return [site for site in sites if site.name in chosen]


def voting_sites(
    model: PreTrainedModel, wanted: str | list[str], ranks: Mapping[str, Sequence[int]], tasks: int
) -> list[Site]:
    """The sites that vote, known without weights; none where the skeleton of the model cannot be traced.

    Args:
        model: a skeleton.
        wanted: as in `choose_sites`.
        ranks: for each matrix the rank of each task's change, 0 where there is none.
        tasks: how many there are.
    """
    try:
        sites = find_sites(model.eval())
    except (RuntimeError, NotImplementedError):
        return []

    def covered(site: Site) -> int:
        """How many tasks change what a site reads."""
        return sum(any(ranks[name][t] for name in site.tensors if name in ranks) for t in range(tasks))

    return choose_sites(sites, wanted, covered, half=model.main_input_name == "pixel_values")


def _group(sites: list[Site], letters: str, *, half: bool) -> list[Site]:
    """The sites of some kinds, in all blocks or in the first half of them."""
    kinds = [[site for site in sites if re.fullmatch(rf"{letter}\d+", site.name)] for letter in letters]
    kept = {site.name for kind in kinds for site in (kind[: max(1, len(kind) // 2)] if half else kind)}
    return [site for site in sites if site.name in kept]
