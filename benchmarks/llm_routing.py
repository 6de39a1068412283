"""Rules of routing for a decoder, on kept activations: `python benchmarks/llm_routing.py --kind chat [--split test]`.

For each form of prompts, which share finds its task: by the mean or the last token or both; by plain residuals, or by the
captured share over that of random words, of the empty prompt or of other inputs of no task; at O and M sites or at all, in
some blocks or in all. Run `benchmarks/llm_seen.py` first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import one_hot

from benchmarks.llm_seen import Seen, kept
from benchmarks.suites.llm.experts import KINDS, Kind, expert_folder
from benchmarks.suites.llm.tasks import TASKS
from massmerge.linalg.factors import lora_svd
from massmerge.routing.neutral import NeutralRouter
from massmerge.routing.projection import ProjectionRouter, of_common_rank, site_basis
from massmerge.routing.selection import vote

LAYERS = {"A": ("q", "k", "v"), "O": ("o",), "M": ("gate", "up"), "D": ("down",)}
REFERENCES = ("none", "words", "template", "newline")
"""By default. `short`, `requests`, `asked` and `random` are others, with `bare ` before their names as plain lines;
`template+random` is votes against both."""
_BLOCKS, _WIDTH = 30, 576


def bases_of(kind: Kind, tasks: Sequence[str], *, scaled: bool = False) -> dict[str, list[Tensor]]:
    """By site, the right singular vectors of each task's adapter; `scaled` by the singular values."""
    states = [load_file(expert_folder(task, kind) / "adapter_model.safetensors") for task in tasks]
    found = {}
    for block in range(_BLOCKS):
        for letter, names in LAYERS.items():
            own = [_site_basis(state, block, names, scaled) for state in states]
            if any(len(v) for v in own):
                found[f"{letter}{block}"] = own if scaled else of_common_rank(own)
    return found


def _site_basis(state: Mapping[str, Tensor], block: int, names: Sequence[str], scaled: bool) -> Tensor:
    factors = []
    for name in names:
        part = "mlp" if name in ("gate", "up", "down") else "self_attn"
        stem = f"base_model.model.model.layers.{block}.{part}.{name}_proj.lora_"
        if f"{stem}A.weight" in state:
            factors.append(lora_svd(state[f"{stem}B.weight"].float(), state[f"{stem}A.weight"].float()))
    if not factors:
        return torch.zeros(0, _WIDTH)
    if scaled:
        return torch.cat([f.s[:, None] * f.v for f in factors])
    return site_basis([(f.s, f.v) for f in factors], max(len(f.s) for f in factors))


def found_share(
    seen: Mapping[str, Seen],
    bases: Mapping[str, list[Tensor]],
    tasks: Sequence[str],
    forms: Sequence[str],
    tokens: Sequence[str],
    against: str,
    votes: str = "standardised",
) -> list[dict[str, float]]:
    """For each form, by task, which share of its prompts finds it."""
    routers = {
        (voter, reference): _router(bases[site], seen, voter, reference)
        for site in bases
        for voter in (f"{site}.{token}" for token in tokens)
        for reference in against.split("+")
    }
    found = []
    for form in forms:
        shares = {}
        for place, task in enumerate(tasks):
            rows = seen[f"{form} {task}"]
            scores = VOTES[votes]([router(rows[voter].float()) for (voter, _), router in routers.items()])
            shares[task] = float((scores.argmin(1) == place).float().mean())
        found.append(shares)
    return found


def _count(scores: list[Tensor]) -> Tensor:
    """How many voters are for each task; less is better."""
    stacked = torch.stack(scores)
    return -one_hot(stacked.argmin(-1), stacked.shape[-1]).sum(0)


def _logs(scores: list[Tensor]) -> Tensor:
    """The sum of the logarithms of what is held against a reference; less is better."""
    return -(-torch.stack(scores)).clamp_min(1e-12).log().sum(0)


VOTES = {"standardised": vote, "count": _count, "logs": _logs}


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
    parser.add_argument("--blocks", default="0-29", help="comma-separated: from block to block")
    parser.add_argument("--tokens", default="mean,last,mean+last", help="comma-separated; content and ending, too")
    parser.add_argument("--votes", choices=tuple(VOTES), default="standardised")
    parser.add_argument("--scaled", action="store_true", help="directions count as much as the update has of them")
    parser.add_argument("--references", default=",".join(REFERENCES), help="comma-separated")
    parser.add_argument("--forms", default="chat,reworded,plain,turns", help="comma-separated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    made = [task for task in TASKS if (expert_folder(task, options.kind) / "metrics.json").is_file()]
    tasks = options.tasks.split(",") if options.tasks else made
    seen: dict[str, Seen] = torch.load(kept(options.split))
    bases = bases_of(options.kind, tasks, scaled=options.scaled)
    forms = ("bare",) if options.kind == "bare" else tuple(options.forms.split(","))
    print(f"{options.kind}, {options.split}: {', '.join(tasks)}")
    print(f"{'sites':6} {'blocks':6} {'token':12} {'reference':9}", *(f"{form:>9}" for form in forms))
    lists = (options.sites, options.blocks, options.tokens, options.references)
    chosen = product(*(asked.split(",") for asked in lists))
    for letters, blocks, token, against in chosen:
        first, last = map(int, blocks.split("-"))
        own = {site: v for site, v in bases.items() if site[0] in letters and first <= int(site[1:]) <= last}
        if not own:
            continue
        found = found_share(seen, own, tasks, forms, token.split("+"), against, options.votes)
        means = [sum(shares.values()) / len(shares) for shares in found]
        print(f"{letters:6} {blocks:6} {token:12} {against:9}", *(f"{mean:9.1%}" for mean in means), flush=True)
        if options.json:
            print(json.dumps(dict(zip(forms, found, strict=True))))


if __name__ == "__main__":
    main()
