"""How the experts become one, as a recipe says it: the method, and the options that this method has."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from massmerge.io.yaml_file import Part

Method = Literal[
    "mass", "average", "task_arithmetic", "ties", "dare", "consensus", "tsv_m", "iso_c", "iso_cts", "tsv_c", "emr"
]
METHODS: tuple[str, ...] = get_args(Method)
# The options of each method with their defaults: those of its paper, or of the public implementation that papers use.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mass": {"budget": 2.0, "rank": None, "redundancy": {}, "base": "copy"},
    "average": {},
    "task_arithmetic": {"scale": "auto"},
    "ties": {"keep": 0.2, "combine": "mean", "scale": "auto"},
    "dare": {"drop": 0.5, "seed": 0, "scale": "auto"},
    "consensus": {"threshold": 0.6, "least": 2, "scale": "auto"},
    "tsv_m": {"rank": "1/T", "scale": "auto"},
    "iso_c": {"scale": "auto"},
    "iso_cts": {"common": 0.8, "scale": "auto"},
    "tsv_c": {"rank": "1/T"},
    "emr": {},
}
_Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Redundancy(Part):
    """Which tasks are left out of the fixed model because an earlier one already stands for them."""

    metric: Literal["cosine", "angles"] = "cosine"
    threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.3


class MergeOptions(Part):
    """How the experts become one. An option that the method does not have is an error."""

    method: Method = "mass"
    budget: Annotated[float, Field(gt=1.0)] | None = None
    """Bytes of the bundle without heads, as a multiple of the base's; 2.0 unless `rank` is given."""
    rank: str | int | float | None = None
    """`1/T` of the full rank (the paper's), a number, or below 1 the share of each delta's energy to keep."""
    redundancy: Redundancy | Literal["none"] = Redundancy()
    base: Literal["copy", "by_reference"] = "copy"
    scale: Literal["auto"] | Annotated[float, Field(gt=0.0)] | None = None
    """Factor on the merged delta: `auto` is chosen on a suite's validation split, or the published one without a suite."""
    keep: _Share | None = None
    """Of each delta the share of entries that `ties` keeps, the largest."""
    combine: Literal["mean", "sum"] | None = None
    """What `ties` makes of the entries that agree in sign."""
    drop: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """The probability with which `dare` drops an entry."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of the entries that `dare` drops."""
    threshold: Annotated[float, Field(ge=0.0)] | None = None
    """An entry matters to a task, for `consensus`, if it is larger than this times what the other tasks add to it."""
    least: Annotated[int, Field(ge=1)] | None = None
    """How many tasks an entry must matter to, to be kept by `consensus`."""
    common: _Share | None = None
    """The share of directions that `iso_cts` takes from the sum of all deltas; the rest are the tasks' own."""

    @field_validator("rank", mode="plain")
    @classmethod
    def _is_rank(cls, rank: object) -> object:
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
        share = isinstance(rank, float) and 0.0 < rank < 1.0
        if rank is None or rank == "1/T" or whole or share:
            return rank
        raise ValueError("a rank is 1/T, a whole number from 1 on, or a share of energy between 0 and 1")

    @field_validator("*", mode="before")
    @classmethod
    def _belongs_to_the_method(cls, value: object, info: ValidationInfo) -> object:
        method, name = info.data.get("method"), info.field_name
        if method is None or name == "method" or value is None or name in _DEFAULTS[method]:
            return value
        known = list(_DEFAULTS[method])
        raise ValueError(f"is no option of {method}, which has {', '.join(known) if known else 'none'}")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("rank") is not None and data.get("budget") is not None and data.get("method", "mass") == "mass":
            raise ValueError("give either budget or rank, not both")
        method = data.get("method", "mass")
        defaults = dict(_DEFAULTS.get(method, {})) if isinstance(method, str) else {}
        if data.get("rank") is not None:
            defaults.pop("budget", None)
        return {**defaults, **{key: value for key, value in data.items() if value is not None}}

    @property
    def static(self) -> bool:
        """Whether the result is an ordinary checkpoint, or one for each task, and not a bundle."""
        return self.method != "mass"

    @property
    def keeps_tasks(self) -> bool:
        """Whether the result is one checkpoint for each task: the methods whose user knows the task."""
        return self.method in ("tsv_c", "emr")

    def own(self) -> dict[str, Any]:
        """The options that the method has, with their values."""
        return {name: getattr(self, name) for name in _DEFAULTS[self.method]}
