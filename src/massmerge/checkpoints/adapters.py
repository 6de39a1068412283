"""LoRA adapters as experts: the update is used as the two thin matrices that it is; DoRA's, of full rank, is formed."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import regex
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from transformers.models.auto import modeling_auto

from massmerge.checkpoints.backbone import Base, infer_task_model, language_class, load_config, split
from massmerge.checkpoints.expert_tensors import ExpertTensor, FullTensor, LowRank
from massmerge.checkpoints.experts import HeadParts, differs
from massmerge.checkpoints.skeleton import Reading, Skeleton, Slot, shape_of, untie_output
from massmerge.checkpoints.sources import Source
from massmerge.checkpoints.stores import Store
from massmerge.errors import InputError, listing
from massmerge.io.tensor_file import TensorInfo

ADAPTER_CONFIG = "adapter_config.json"
# Options under which the update is not `base + scale · B A`, or the base's own weights were changed.
_OTHER_KINDS = (
    "use_qalora", "use_bdlora", "layer_replication", "target_parameters", "megatron_config",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip
# These start from a base whose weights were replaced by what the adapter leaves over.
_CHANGED_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga")
_PATTERN_SECONDS, _PATTERN_LIMIT = 5.0, 1000  # for all patterns of an adapter together; characters of each
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class LoraPair:
    """Where the two matrices of one updated tensor lie, and the factor on their product."""

    b: str
    a: str
    scale: float
    embedding: bool = False
    bias: str | None = None
    """What is added to the layer's bias, times the same factor (`lora_bias`)."""
    magnitude: str | None = None
    """Of DoRA: the length that each row of the updated matrix is given, so that the update has full rank."""


@dataclass(frozen=True)
class AdapterExpert:
    """A PEFT adapter: LoRA, rsLoRA or DoRA, with what it saved whole."""

    source: Source
    skeleton: Skeleton
    store: Store
    pairs: dict[str, LoraPair]
    whole: dict[str, Reading]
    head: HeadParts | None
    base: Base
    warnings: list[str] = field(default_factory=list)

    @property
    def form(self) -> str:
        """An update of the base."""
        return "adapter"

    def names(self) -> set[str]:
        """The tensors that the adapter updates or replaces."""
        return set(self.pairs) | set(self.whole) | set(self._biases)

    def rank_limit(self, name: str) -> int | None:
        """The adapter's rank at that tensor."""
        pair = self.pairs.get(name)
        full = pair is None or pair.magnitude is not None
        return None if pair is None or full else min(self.store.infos[pair.a].shape[0], *_matrix(self.base.slots[name]))

    def read(self, name: str) -> ExpertTensor:
        """The two matrices, the tensor that the adapter saved whole, or a bias with what is added to it."""
        if name not in self.pairs:
            return FullTensor(self._whole(name))
        update, magnitude = self._pair(name), self.pairs[name].magnitude
        return update if magnitude is None else FullTensor(self._rescaled(name, update, magnitude))

    def stored(self, name: str) -> None:
        """Nowhere: what an adapter holds is added to the base's tensors."""

    def _rescaled(self, name: str, update: LowRank, magnitude: str) -> Tensor:
        """A matrix of DoRA: base and update, with rows of the lengths that the adapter has learnt."""
        rows = self.base.read(name).float() + update.b @ update.a
        lengths = self.store.read(magnitude).float().reshape(-1, 1)
        return rows * (lengths / rows.norm(dim=1, keepdim=True))

    @property
    def at_hand(self) -> bool:
        """Whether the adapter was downloaded."""
        return self.source.at_hand

    def changes(self, name: str, base: Base) -> bool:
        """Whether a tensor differs; what the two matrices update is taken to."""
        return name in self.pairs or differs(name, base, self._whole(name))

    def apart_bytes(self, base: int, stored: int) -> int:
        """Bytes of its file."""
        head = self.head.readings.values() if self.head else ()
        return sum(info.nbytes for info in self.store.infos.values()) - sum(reading.info.nbytes for reading in head)

    def _whole(self, name: str) -> Tensor:
        if name in self._biases:
            return self.base.read(name).float() + self._added(self._biases[name])
        return self.whole[name].read(self.store, self.skeleton.config)

    def _pair(self, name: str) -> LowRank:
        if name in self.whole:
            self._refuse_other_values(name, self._whole(name))
        pair = self.pairs[name]
        if pair.bias is not None and _bias_of(name) not in self.base.slots and self._added(pair).any():
            raise InputError(
                f"{self.source.text}: adds a bias to {name}, whose layer has none. Train without `lora_bias`."
            )
        a, b = self.store.read(pair.a).float(), self.store.read(pair.b).float() * pair.scale
        if pair.embedding:  # stored for the transposed weight: A (r, rows), B (columns, r)
            return LowRank(a.mT.contiguous(), b.mT.contiguous())
        return LowRank(b.flatten(1), a.flatten(1))

    @cached_property
    def _biases(self) -> dict[str, LoraPair]:
        """The biases that are added to, with the pairs whose layers they are of."""
        names = {_bias_of(name): pair for name, pair in self.pairs.items() if pair.bias is not None}
        return {name: pair for name, pair in names.items() if name in self.base.slots}

    def _added(self, pair: LoraPair) -> Tensor:
        assert pair.bias is not None
        return self.store.read(pair.bias).float() * pair.scale

    def _refuse_other_values(self, name: str, saved: Tensor) -> None:
        """Of updated embeddings peft also saves what they were before the update: that must be the base's."""
        ours = self.base.read(name)
        if not (ours.to(saved.dtype).equal(saved) or saved.to(ours.dtype).equal(ours)):
            raise InputError(
                f"{self.source.text}: made for another base: it updates {name}, whose values differ from the base's. "
                "Use the base that the adapter was trained on."
            )


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _matrix(slot: Slot) -> tuple[int, int]:
    assert slot.matrix is not None
    return slot.matrix


def is_adapter(source: Source) -> bool:
    """Whether the source is an adapter's folder."""
    return source.file(ADAPTER_CONFIG) is not None


def open_adapter(source: Source, base: Base) -> AdapterExpert:
    """An adapter's folder as an expert of the base.

    Raises:
        InputError: it is not a plain low-rank update, or was made for another base; every difference is listed.
    """
    config = source.json(ADAPTER_CONFIG) or {}
    _refuse_other_kinds(config)
    options = _options(config)
    store = source.store("adapter_model", "adapter_model")
    # With `bias: all` peft also saves the biases of heads that the saved ones replace.
    plain = {key: _plain_name(key) for key in store.infos if ".original_module." not in key}
    whole = {name: store.infos[key] for key, name in plain.items() if not _lora_part(name)}
    skeleton = _with_own_output(_task_skeleton(source, options, base, whole, plain), base, set(plain.values()))
    parts = split(skeleton, base.skeleton)
    pairs, complaints = _find_pairs(options, plain, skeleton, parts.backbone, base, store)
    match = skeleton.match(whole)
    keys = {name: key for key, name in plain.items()}
    readings = {
        name: Reading((keys[reading.keys[0]],), reading.info)
        for name, reading in match.readings.items()
        if name not in match.mismatched
    }
    complaints += [f"{name}: not in a {skeleton.class_name}" for name in match.unexpected]
    complaints += [f"{name}: {a} in the adapter, {b} in the base" for name, (a, b) in match.mismatched.items()]
    if complaints:
        raise InputError(
            f"made for another base ({config.get('base_model_name_or_path')}): these modules are missing or differ:"
            f"{listing(complaints, 200)}"
        )
    if not pairs:
        raise InputError(f"{source.text}: holds no LoRA matrices.")
    head = {name: readings[name] for name in parts.head if name in readings}
    absent = [name for name in parts.head if name not in readings]
    # A language head that no adapter saved is the base's.
    writes = skeleton.class_name == language_class(base.skeleton.config)
    lost = absent and not writes
    warnings = [f"its head is not in the adapter (modules_to_save):{listing(absent)}"] if lost else []
    inside = {parts.backbone[name]: r for name, r in readings.items() if name in parts.backbone}
    found = HeadParts(skeleton, store, head) if head and not absent else None
    return AdapterExpert(source, skeleton, store, pairs, inside, found, base, warnings)


def _refuse_other_kinds(config: dict[str, Any]) -> None:
    kind = str(config.get("peft_type"))
    if "peft_type" not in config:
        raise InputError("its adapter_config.json has no peft_type. Save the adapter again with peft.")
    if kind != "LORA":
        raise InputError(f"is a {kind} adapter; only LoRA and rsLoRA are low-rank updates. Merge it into a full model.")
    used = [option for option in _OTHER_KINDS if config.get(option)]
    start = str(config.get("init_lora_weights", True))
    if _CHANGED_BASE.search(start):
        used.append(f"init_lora_weights: {start}")
    if used:
        raise InputError(
            f"is a LoRA adapter with {', '.join(used)}, which is not a plain low-rank update. Merge it into a full model."
        )


class _AutoMapping(BaseModel):
    base_model_class: str | None = None


class _Options(BaseModel):
    """What is read of an adapter's configuration beside its kind."""

    lora_alpha: _Number = 8
    alpha_pattern: dict[Annotated[str, Field(max_length=_PATTERN_LIMIT)], _Number] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    auto_mapping: _AutoMapping | None = None
    task_type: str | None = None


def _options(config: dict[str, Any]) -> _Options:
    try:
        return _Options.model_validate(config, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part)[:80] for part in first["loc"])
        raise InputError(
            f"its {ADAPTER_CONFIG} has {where}: {repr(first['input'])[:80]}. {first['msg']}. Save the adapter again."
        ) from None


class _Alphas:
    """The alpha of each module, by an adapter's patterns: regular expressions of others, so their time is bounded."""

    def __init__(self, options: _Options) -> None:
        self._default, self._left = options.lora_alpha, _PATTERN_SECONDS
        self._patterns = [(text, self._compiled(text), value) for text, value in (options.alpha_pattern or {}).items()]

    def _compiled(self, text: str) -> Any:
        try:
            if "{" in text:  # a count of counts takes memory without end before it matches anything
                raise regex.error("counted repetitions are not supported")
            return regex.compile(rf"(.*\.)?({text})$")
        except (regex.error, RecursionError) as error:
            raise self._refusal(text, f"is not a valid regular expression ({error})") from None

    def of(self, module: str) -> float:
        """The alpha of the first pattern that fits, as PEFT chooses it."""
        for text, pattern, value in self._patterns:
            began = time.monotonic()
            try:
                if pattern.match(module, timeout=max(self._left, 0.001)):
                    return value
            except TimeoutError:
                raise self._refusal(text, f"takes more than {_PATTERN_SECONDS:g} s to compare with names") from None
            self._left -= time.monotonic() - began
        return self._default

    @staticmethod
    def _refusal(text: str, fault: str) -> InputError:
        return InputError(
            f"its {ADAPTER_CONFIG} has alpha_pattern {text[:80]!r}, which {fault}. Use module names instead."
        )


def _plain_name(key: str) -> str:
    """A name in an adapter's file as a name in the model that was wrapped."""
    for wrapper in (".modules_to_save", ".base_layer", ".default"):
        key = key.replace(f"{wrapper}.", ".")
    return key.removeprefix("base_model.model.")


def _lora_part(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(?P<module>.+)\.lora_(embedding_)?(?P<part>[AB]|B\.bias|magnitude_vector)(\.weight)?", name)


def _task_skeleton(
    source: Source, options: _Options, base: Base, whole: Mapping[str, TensorInfo], plain: Mapping[str, str]
) -> Skeleton:
    """The model that was wrapped: by the folder's config.json, by the adapter's own word, or by what it saved."""
    if source.file("config.json") is not None:
        own = load_config(source)
        return shape_of(own, (own.architectures or [None])[0])
    modules = {m["module"] + ".weight" for m in map(_lora_part, plain.values()) if m}
    names = {**whole, **dict.fromkeys(modules, TensorInfo((), base.dtype))}
    said = options.auto_mapping.base_model_class if options.auto_mapping else None
    if options.task_type == "TOKEN_CLS":  # its head has the shape of one for whole inputs
        said = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(base.skeleton.config.model_type)
    return infer_task_model(base.skeleton, names, [said] if said else [])[0]


def _with_own_output(skeleton: Skeleton, base: Base, names: Iterable[str]) -> Skeleton:
    """An output layer that the adapter saves or updates is no longer tied to the base's embeddings."""
    prefix = skeleton.submodule(type(base.skeleton.model)) or ""
    held = {f"{prefix}{name}": base.info(name) for name in base.slots}
    touched = {f"{part['module']}.weight" if (part := _lora_part(name)) else name for name in names}
    return untie_output(skeleton, held | dict.fromkeys(touched, TensorInfo((), torch.float32)))


def _find_pairs(
    options: _Options,
    plain: Mapping[str, str],
    skeleton: Skeleton,
    backbone: Mapping[str, str],
    base: Base,
    store: Store,
) -> tuple[dict[str, LoraPair], list[str]]:
    """The LoRA matrices under the base's names, and what does not fit the base."""
    found: dict[str, dict[str, str]] = {}
    for key, name in plain.items():
        if part := _lora_part(name):
            found.setdefault(part["module"], {})[part["part"]] = key
    targets = skeleton.rename(f"{module}.weight" for module in found)
    pairs: dict[str, LoraPair] = {}
    complaints: list[str] = []
    alphas = _Alphas(options)
    for module, keys in found.items():
        target = skeleton.canonical.get(targets[f"{module}.weight"][0])
        slot = base.slots.get(backbone.get(target or "", ""))
        if not keys.keys() >= {"A", "B"}:
            complaints.append(f"{module}: only one of its two matrices is present")
        elif slot is None or slot.matrix is None:
            complaints.append(f"{module}: not in the base's {base.skeleton.class_name}")
        elif slot.name in pairs:
            complaints.append(f"{module}: tied to another module that the adapter updates too")
        elif fault := _shape_fault(keys, store):
            complaints.append(f"{module}: {fault}")
        else:
            rank, alpha = store.infos[keys["A"]].shape[0], alphas.of(module)
            scale = alpha / math.sqrt(rank) if options.use_rslora else alpha / rank
            embedding, magnitude = "embedding_A" in keys["A"], keys.get("magnitude_vector")
            pair = LoraPair(keys["B"], keys["A"], scale, embedding, keys.get("B.bias"), magnitude)
            shape = _update_shape(pair, store)
            if options.use_dora and (slot.kind != "linear" or magnitude is None):
                complaints.append(
                    f"{module}: DoRA is read of linear layers, with their magnitudes. Merge it into a full model"
                )
            elif shape == slot.matrix:
                pairs[slot.name] = pair
            else:
                complaints.append(f"{module}: updates a {shape} matrix, the base's is {slot.matrix}")
    return pairs, complaints


def _shape_fault(keys: Mapping[str, str], store: Store) -> str | None:
    """What is wrong with the two matrices of a module, and with its bias, whatever the base."""
    a, b = (store.infos[keys[part]].shape for part in "AB")
    if len(a) < 2 or len(b) < 2 or a[0] != b[1] or math.prod(b[2:]) != 1:
        return f"its matrices, {b} and {a}, cannot be multiplied"
    if not a[0]:
        return "its rank is 0"
    if "magnitude_vector" in keys and math.prod(store.infos[keys["magnitude_vector"]].shape) != b[0]:
        return f"its magnitudes, {store.infos[keys['magnitude_vector']].shape}, do not fit {b}"
    if "B.bias" in keys and store.infos[keys["B.bias"]].shape != b[:1]:
        return f"its bias, {store.infos[keys['B.bias']].shape}, does not fit {b}"
    return None


def _update_shape(pair: LoraPair, store: Store) -> tuple[int, int]:
    rows, columns = store.infos[pair.b].shape[0], math.prod(store.infos[pair.a].shape[1:])
    return (columns, rows) if pair.embedding else (rows, columns)
