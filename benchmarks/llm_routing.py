"""Rules of routing for a decoder, on kept activations: `python benchmarks/llm_routing.py --kind chat [--split test]`.

For each form of prompts, which share finds its task: by the mean or the last token or both; by plain residuals, or by the
captured share over that of random words or of the empty prompt; at O and M sites or at all. Run `benchmarks/llm_seen.py`
first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.llm_seen import Seen, kept
from benchmarks.suites.llm.experts import KINDS, Kind, expert_folder
from benchmarks.suites.llm.tasks import TASKS
from massmerge.linalg.factors import lora_svd
from massmerge.routing.neutral import NeutralRouter
from massmerge.routing.projection import ProjectionRouter, of_common_rank, site_basis
from massmerge.routing.selection import vote

LAYERS = {"A": ("q", "k", "v"), "O": ("o",), "M": ("gate", "up"), "D": ("down",)}
REFERENCES = ("none", "words", "template", "newline")
_BLOCKS, _WIDTH = 30, 576


def bases_of(kind: Kind, tasks: Sequence[str]) -> dict[str, list[Tensor]]:
    """By site, the right singular vectors of each task's adapter."""
    states = [load_file(expert_folder(task, kind) / "adapter_model.safetensors") for task in tasks]
    found = {}
    for block in range(_BLOCKS):
        for letter, names in LAYERS.items():
            own = [_site_basis(state, block, names) for state in states]
            if any(len(v) for v in own):
                found[f"{letter}{block}"] = of_common_rank(own)
    return found


def _site_basis(state: Mapping[str, Tensor], block: int, names: Sequence[str]) -> Tensor:
    factors = []
    for name in names:
        part = "mlp" if name in ("gate", "up", "down") else "self_attn"
        stem = f"base_model.model.model.layers.{block}.{part}.{name}_proj.lora_"
        if f"{stem}A.weight" in state:
            factors.append(lora_svd(state[f"{stem}B.weight"].float(), state[f"{stem}A.weight"].float()))
    if not factors:
        return torch.zeros(0, _WIDTH)
    return site_basis([(f.s, f.v) for f in factors], max(len(f.s) for f in factors))


def found_share(
    seen: Mapping[str, Seen],
    bases: Mapping[str, list[Tensor]],
    tasks: Sequence[str],
    forms: Sequence[str],
    tokens: Sequence[str],
    against: str,
) -> list[dict[str, float]]:
    """For each form, by task, which share of its prompts finds it."""
    voters = [f"{site}.{token}" for site in bases for token in tokens]
    routers = {voter: _router(bases[voter.partition(".")[0]], seen, voter, against) for voter in voters}
    found = []
    for form in forms:
        shares = {}
        for place, task in enumerate(tasks):
            rows = seen[f"{form} {task}"]
            scores = vote([router(rows[voter].float()) for voter, router in routers.items()])
            shares[task] = float((scores.argmin(1) == place).float().mean())
        found.append(shares)
    return found


def _router(bases: list[Tensor], seen: Mapping[str, Seen], voter: str, against: str) -> ProjectionRouter:
    if against == "none":
        return ProjectionRouter(bases)
    return NeutralRouter(bases, seen[f"reference {against}"][voter].float())


def main() -> None:
    """Print a table; with --json all shares of all tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="chat")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--tasks", help="comma-separated; those that have an adapter if not given")
    parser.add_argument("--sites", default="OM,AOMD", help="comma-separated kinds of sites")
    parser.add_argument("--references", default=",".join(REFERENCES), help="comma-separated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    made = [task for task in TASKS if (expert_folder(task, options.kind) / "metrics.json").is_file()]
    tasks = options.tasks.split(",") if options.tasks else made
    seen: dict[str, Seen] = torch.load(kept(options.split))
    bases = bases_of(options.kind, tasks)
    forms = ("bare",) if options.kind == "bare" else ("chat", "reworded", "plain", "turns")
    print(f"{options.kind}, {options.split}: {', '.join(tasks)}")
    print(f"{'sites':6} {'token':9} {'reference':9}", *(f"{form:>9}" for form in forms))
    for letters in options.sites.split(","):
        own = {site: rows for site, rows in bases.items() if site[0] in letters}
        for token in ("mean", "last", "mean+last") if own else ():
            for against in options.references.split(","):
                found = found_share(seen, own, tasks, forms, token.split("+"), against)
                means = [sum(shares.values()) / len(shares) for shares in found]
                print(f"{letters:6} {token:9} {against:9}", *(f"{mean:9.1%}" for mean in means), flush=True)
                if options.json:
                    print(json.dumps(dict(zip(forms, found, strict=True))))


if __name__ == "__main__":
    main()
