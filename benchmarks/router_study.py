"""Which data-free rule routes best, on a suite's validation rows: `python benchmarks/router_study.py BUNDLE SUITE`.

One pass of the base over the rows gives every score at every site and token; every rule (which of them vote) is then tried
on these. No rule sees a label: labels only say afterwards how often it was right. Rules are compared on one half of the
tasks' rows and confirmed on the other half; all tasks compete in both.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import massmerge as mm
from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.reader import Bundle
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.model.route.first_pass import FirstPass, Token, Voter
from massmerge.routing import Site, standardize

Stack = list[tuple[Tensor, Tensor]]  # for each task `s (k)` and `v (k, d)`


def energies(z: Tensor, stack: Stack) -> list[Tensor]:
    """For each task the squared coordinates (batch, k) on its vectors, as shares of the activation's."""
    length = z.square().sum(1, keepdim=True).clamp_min(1e-30)
    return [(z @ v.mT).square() / length for _, v in stack]


def residual(z: Tensor, stack: Stack) -> Tensor:
    """What remains of the activation: the paper's score."""
    return torch.stack([(1 - e.sum(1)).clamp_min(0).sqrt() for e in energies(z, stack)], 1)


def lift(z: Tensor, stack: Stack) -> Tensor:
    """The captured share, against that of a random subspace of the same size."""
    return torch.stack([-e.sum(1) / max(1, e.shape[1]) for e in energies(z, stack)], 1)


def log_residual(z: Tensor, stack: Stack) -> Tensor:
    """The logarithm of what remains, against what would remain of a random subspace of the same size."""
    d = z.shape[1]
    return torch.stack(
        [torch.log((1 - e.sum(1)).clamp_min(1e-6)) - torch.tensor(max(1e-6, 1 - e.shape[1] / d)).log()
         for e in energies(z, stack)], 1,
    )  # fmt: skip


def weighted(power: float) -> Callable[[Tensor, Stack], Tensor]:
    """The captured share, each direction by its singular value to some power."""

    def score(z: Tensor, stack: Stack) -> Tensor:
        found = []
        for e, (s, _) in zip(energies(z, stack), stack, strict=True):
            w = s**power
            found.append(-(e * w).sum(1) / w.sum().clamp_min(1e-30))
        return torch.stack(found, 1)

    return score


def without_common(share: float, inner: Callable[[Tensor, Stack], Tensor]) -> Callable[[Tensor, Stack], Tensor]:
    """Another score, after directions that at least a share of the tasks have in common are taken out of all of them."""

    def score(z: Tensor, stack: Stack) -> Tensor:
        total = sum(v.mT @ v for _, v in stack)
        values, vectors = torch.linalg.eigh(total)
        common = vectors[:, values > share * len(stack)]
        rest = z - (z @ common) @ common.mT
        cut = []
        for s, v in stack:
            rows = s[:, None] * (v - (v @ common) @ common.mT)
            _, s2, v2 = torch.linalg.svd(rows, full_matrices=False)
            kept = s2 > 1e-4 * s2[0].clamp_min(1e-30)
            cut.append((s2[kept], v2[kept]))
        return inner(rest, cut)

    return score


SCORES: dict[str, Callable[[Tensor, Stack], Tensor]] = {
    "residual": residual,
    "lift": lift,
    "log residual": log_residual,
    "weighted s": weighted(1.0),
    "weighted s²": weighted(2.0),
    "weighted √s": weighted(0.5),
    "residual, common ½ out": without_common(0.5, residual),
    "residual, common ⅓ out": without_common(1 / 3, residual),
    "weighted s, common ½ out": without_common(0.5, weighted(1.0)),
}


def site_stack(tensors: TaskTensors, site: Site) -> Stack:
    """The tasks' singular vectors at a site; of several layers, their deltas stacked."""
    stack = []
    for task in range(len(tensors.names)):
        found = [f for name in site.tensors if (f := tensors.factors(task, name)) is not None]
        if not found:
            stack.append((torch.zeros(1), torch.zeros(1, site.width)))
            continue
        rows = torch.cat([f.s[:, None] * f.v for f in found])
        _, s, v = torch.linalg.svd(rows, full_matrices=False)
        kept = min(max(f.rank for f in found), int((s > 1e-6 * s[0]).sum()))
        stack.append((s[:kept], v[:kept]))
    return stack


Scores = dict[tuple[str, Voter], Tensor]  # standardised scores (rows, T)


def gather(bundle: Path, suite: Path, split: str, limit: int) -> tuple[Scores, Tensor, list[str]]:
    """Every score of every voter, and the true task of each row."""
    model = mm.load(bundle, router="projection", check=False)
    sites = [site for site in model.sites if re.fullmatch(r"[AOM]\d+", site.name)]
    tokens: tuple[Token, ...] = ("mean", "each")  # the first word of a text says nothing
    if model.takes_images:
        tokens = ("cls", *tokens)
    voters = [Voter(site, token) for site in sites for token in tokens]
    first = FirstPass(model.core.base, voters)
    tensors = TaskTensors(Bundle(bundle, check=False), model.core.placement)
    stacks = {site: site_stack(tensors, site) for site in sites}
    ready = prepare_evaluation(bundle, suite, split=split, limit=limit)
    for data in ready.data.values():
        data.read_inputs()
    inputs = [data.inputs[place] for data in ready.data.values() for place in range(len(data))]
    truth = [model.tasks.index(task) for task, data in ready.data.items() for _ in data.rows]
    rows = [model.core.reader.row(item) for item in inputs]
    order = sorted(range(len(rows)), key=lambda i: max(t.shape[0] for t in rows[i].values()))  # little padding
    found: dict[tuple[str, Voter], list[Tensor]] = {}
    for start in tqdm(range(0, len(rows), 32), unit="batch"):
        seen = first(model.core.batch([rows[i] for i in order[start : start + 32]]))
        for voter, activation in zip(voters, seen, strict=True):
            for name, score in SCORES.items():
                if voter.token == "each" and "common" in name:
                    continue  # a decomposition for every token would take hours
                values = activation.averaged(score(activation.vectors, stacks[voter.site]))
                found.setdefault((name, voter), []).append(standardize(values))
    back = torch.tensor(order).argsort()
    return {key: torch.cat(parts)[back] for key, parts in found.items()}, torch.tensor(truth), model.tasks


def choices(voters: list[Voter]) -> dict[str, list[Voter]]:
    """Voters by a name for the choice: which kind of site, which blocks, which token."""
    blocks = 1 + max(int(v.site.name[1:]) for v in voters)
    ranges = {"first half": range(blocks // 2), "last half": range(blocks // 2, blocks), "all": range(blocks)}
    there = {v.token for v in voters}
    tokens = {"cls": {"cls"}, "mean": {"mean"}, "both": {"cls", "mean"}, "each": {"each"}}
    named = {
        f"{'+'.join(letters)}, {part}, {token}": [
            v for v in voters if v.site.name[0] in letters and int(v.site.name[1:]) in which and v.token in names
        ]
        for letters in ("A", "M", "O", "MO", "AMO")
        for part, which in ranges.items()
        for token, names in tokens.items()
        if names <= there
    }
    return {name: chosen for name, chosen in (named | {v.name: [v] for v in voters}).items() if chosen}


def study(bundle: Path, suite: Path, split: str, limit: int) -> list[dict[str, object]]:
    """Routing accuracy of every rule, on each half of the tasks, best first."""
    scores, truth, tasks = gather(bundle, suite, split, limit)
    halves = [truth % 2 == half for half in (0, 1)]
    found: list[dict[str, object]] = []
    for name in SCORES:
        for rule, chosen in choices([voter for score, voter in scores if score == name]).items():
            right = torch.stack([scores[name, voter] for voter in chosen]).sum(0).argmin(1) == truth
            found.append({"score": name, "sites": rule, "all": right.float().mean().item(),
                          "halves": [right[half].float().mean().item() for half in halves],
                          "tasks": {t: right[truth == i].float().mean().item() for i, t in enumerate(tasks)
                                    if bool((truth == i).any())}})  # fmt: skip
    return sorted(found, key=lambda row: -float(row["all"]))  # type: ignore[arg-type]


def main() -> None:
    """Gather, try, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--limit", type=int, default=100, help="rows of each task")
    parser.add_argument("--show", type=int, default=40, help="how many rules to print")
    parser.add_argument("--json", type=Path, help="write all of them to this file")
    options = parser.parse_args()
    found = study(options.bundle, options.suite, options.split, options.limit)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{'score':<26}{'voters':<24}{'all':>7}{'half':>7}{'other':>7}")
    for row in found[: options.show]:
        first, second = row["halves"]  # type: ignore[misc]
        print(f"{row['score']:<26}{row['sites']:<24}{row['all']:7.3f}{first:7.3f}{second:7.3f}")


if __name__ == "__main__":
    main()
