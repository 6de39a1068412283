"""Where tensors are and which type they have: one object, from the options of a command to every tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from massmerge.errors import InputError
from massmerge.io.dtypes import DTYPES

CPU = torch.device("cpu")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Placement:
    """Where everything is computed, and in which types.

    Decisions are float32 or better whatever the types: what voters see, residuals, Gram matrices, softmax, heads.

    Attributes:
        device: where tensors are.
        compute: the type of activations and of what layers multiply.
        storage: the type that weights and factors have: in memory, or in the file that a merge writes.
    """

    device: torch.device = CPU
    compute: torch.dtype = torch.float32
    storage: torch.dtype = torch.float32

    @classmethod
    def choose(cls, device: str = "auto", dtype: str = "auto", base: torch.dtype = torch.float32) -> Placement:
        """The placement of a model that answers.

        Args:
            device: as torch names it; `auto` is a GPU if there is one.
            dtype: `auto` is the base's own type where the device multiplies in it as fast as in float32, else float32.
            base: the type of the base's numbers.

        Raises:
            InputError: there is no such device or type.
        """
        place = find_device(device)
        kind = _fast_type(base, place) if dtype == "auto" else find_dtype(dtype)
        return cls(place, kind, kind)

    @classmethod
    def exact(cls, device: str = "auto", dtype: torch.dtype = torch.float32) -> Placement:
        """The placement of a merge: computed in float32, and in float64 where that matters, whatever is written.

        Args:
            device: as torch names it; `auto` is a CUDA GPU if there is one.
            dtype: the type that is written.

        Raises:
            InputError: there is no such device, or it knows no float64.
        """
        place = find_device("cuda" if device == "auto" and torch.cuda.is_available() else device)
        if place.type == "mps" and device != "auto":
            raise InputError("mps has no float64, which merging needs. Use cpu or cuda.")
        return cls(CPU if place.type == "mps" else place, torch.float32, dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """A weight or factor where it is computed with; whole numbers keep their type."""
        return tensor.to(self.device, self.storage) if tensor.is_floating_point() else tensor.to(self.device)

    def batch(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs where they are computed with."""
        return {name: self._moved(tensor) for name, tensor in tensors.items()}

    def _moved(self, tensor: Tensor) -> Tensor:
        kind = self.compute if tensor.is_floating_point() else tensor.dtype
        if self.device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self.device, kind)
        # From pinned memory a copy runs beside the computation that is under way.
        return tensor.pin_memory().to(self.device, non_blocking=True).to(kind)


def moved(part: _T, device: torch.device) -> _T:
    """An object of ours, such as a router, with all of its tensors on a device; what is on the CPU stays as it is there."""
    return part if device.type == "cpu" else _moved(part, device, {})


def _moved(part: Any, device: torch.device, known: dict[int, Any]) -> Any:
    """The same for any value; what several share stays shared."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, nn.Module):
        return copy.deepcopy(part).to(device)
    if isinstance(part, list | tuple):
        items = [_moved(one, device, known) for one in part]
        return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
    if isinstance(part, dict):
        return {name: _moved(one, device, known) for name, one in part.items()}
    if not type(part).__module__.startswith("massmerge."):
        return part
    if id(part) not in known:
        found = known[id(part)] = copy.copy(part)
        vars(found).update({name: _moved(one, device, known) for name, one in vars(part).items()})
    return known[id(part)]


def find_device(name: str) -> torch.device:
    """The device of that name; for `auto` a GPU if there is one.

    Raises:
        InputError: there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"cannot run on {name!r} ({str(error).splitlines()[0]}). Use cpu, or cuda or mps with such a GPU."
        ) from None


def find_dtype(name: str) -> torch.dtype:
    """The type of that name.

    Raises:
        InputError: there is none to compute in.
    """
    if name not in DTYPES[1:]:
        raise InputError(f"dtype is one of {', '.join(DTYPES)}, not {name!r}.")
    found: torch.dtype = getattr(torch, name)
    return found


def _fast_type(base: torch.dtype, device: torch.device) -> torch.dtype:
    """The base's type if the device has instructions for it: others multiply 16 bits several times as slowly."""
    if base not in (torch.bfloat16, torch.float16):
        return torch.float32
    if device.type == "cpu":
        return base if base == torch.bfloat16 and _has_bfloat16() else torch.float32
    return base


def _has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16."""
    asked = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # not in all versions
    return bool(asked and asked()) and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
