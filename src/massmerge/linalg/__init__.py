"""The mathematics of the method: plain functions on tensors."""

from massmerge.linalg.factors import (
    Factors,
    accept_distinct,
    core_matrix,
    cosine_matrix,
    energy_rank,
    inverse_sqrt,
    lora_svd,
    polar_factor,
    principal_cosine,
    quick_core,
    remaining_energy,
    truncated_svd,
    tsv_merge,
    weighted_core,
)

__all__ = [
    "Factors",
    "accept_distinct",
    "core_matrix",
    "cosine_matrix",
    "energy_rank",
    "inverse_sqrt",
    "lora_svd",
    "polar_factor",
    "principal_cosine",
    "quick_core",
    "remaining_energy",
    "truncated_svd",
    "tsv_merge",
    "weighted_core",
]
