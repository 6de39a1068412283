"""What `mass.json` may say. Whoever made the bundle chose all of it, so all of it is checked when it is read."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from massmerge.bundle.layout import (
    BASE_CONFIG,
    FORMAT_VERSION,
    MANIFEST,
    RECIPE,
    STATIC_RECIPE,
    STATISTICS,
    factors_name,
    holds_base,
)
from massmerge.recipe import refuse_same_names, task_name

# What a bundle is made of. An adapter's configuration would make transformers load another base.
_KINDS = (".json", ".safetensors", ".yaml", ".md", ".txt", ".model", ".jinja")
_NOT_OURS = ("adapter_config.json",)

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Name = Annotated[str, Field(max_length=10_000)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
# Control characters would reach terminals; behind a colon Windows has drives and streams.
_FileName = Annotated[str, Field(max_length=250, pattern=r"^[^\x00-\x1f\x7f:]+$")]


class _Part(BaseModel):
    """A part of a manifest. Later versions may add fields, so those that are not known are let through."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _File(_Part):
    bytes: _Count
    sha256: _Sha256


class _Base(_Part):
    kind: _Name = Field(alias="class")
    bytes: Annotated[int, Field(ge=1, lt=2**63)]
    dtype: Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None = None
    source: _Name | None = None
    revision: _Name | None = None
    location: _Name | None = None
    sha256: _Sha256 | None = None


class _Task(_Part):
    name: _Name
    source: _Name
    revision: _Name | None
    form: _Name
    head: _Name


class _Manifest(_Part):
    """What every merge writes."""

    format_version: Annotated[int, Field(ge=1, le=FORMAT_VERSION)]
    method: _Name
    fingerprint: _Name
    base: _Base
    files: Annotated[dict[_FileName, _File], Field(min_length=1)]

    def refuse_names(self, names: list[str], needed: list[str]) -> None:
        """Refuse tasks that are no folder names, files of other kinds than ours, and a lack of files that are needed."""
        refuse_same_names(map(task_name, names))
        self._refuse_places()
        other = [n for n in self.files if PurePosixPath(n).suffix not in _KINDS or PurePosixPath(n).name in _NOT_OURS]
        if other:
            raise ValueError(f"lists {', '.join(other[:5])}, which a bundle does not contain")
        missing = [name for name in needed if name not in self.files]
        if missing:
            raise ValueError(f"does not list {', '.join(missing[:5])}")

    def _refuse_places(self) -> None:
        """Refuse names that are one place to some file system, or a file and a folder at once."""
        places = {PurePosixPath(name.lower()) for name in self.files}
        above = {folder for place in places for folder in place.parents}
        if len(places) < len(self.files) or places & above or PurePosixPath(MANIFEST) in places:
            raise ValueError("lists two files at one place")


class _Bundle(_Manifest):
    tasks: Annotated[list[_Task], Field(min_length=1)]
    ranks: dict[_Name, list[_Count]]
    router_kind: _Name | None = None
    confidence: dict[_Name, dict[_Name, _Number]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agrees(self) -> _Bundle:
        names = [task.name for task in self.tasks]
        factors = [factors_name(name) for name in names]
        self.refuse_names(names, [RECIPE, STATISTICS, BASE_CONFIG, *factors])
        if not holds_base(self.files) and (self.base.location is None or self.base.sha256 is None):
            raise ValueError("lists neither weights nor the location of the base")
        if any(len(ranks) != len(names) for ranks in self.ranks.values()):
            raise ValueError(f"has ranks that are not one for each of its {len(names)} tasks")
        return self


class _Checkpoint(_Manifest):
    """Of a static merge."""

    tasks: Annotated[list[_Name], Field(min_length=1)]
    needed_bytes: _Count

    @model_validator(mode="after")
    def _agrees(self) -> _Checkpoint:
        self.refuse_names(self.tasks, [STATIC_RECIPE])
        return self


def manifest_fault(data: dict[str, Any]) -> str | None:
    """The first thing in a manifest that no merge writes, in words; none if it is as it should be."""
    try:
        (_Bundle if data.get("method") == "mass" else _Checkpoint).model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(repr(str(part)[:80])[1:-1] for part in first["loc"])  # control characters as escapes
        return f"{where}: {first['msg']}" if where else str(first["msg"]).removeprefix("Value error, ")
    return None
