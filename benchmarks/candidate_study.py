"""Who decides on unclear images, on a suite's validation rows: `python benchmarks/candidate_study.py BUNDLE SUITE`.

The first look, the closer look and every task's head are asked about every row once; every rule (which images are looked at
again, how many candidates answer, what their heads' word is worth) is then tried on these. No rule sees a label: labels only
say afterwards how often it was right. Both halves of the tasks are shown; all tasks compete in both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import massmerge as mm
from massmerge.errors import InputError
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.model.route.decide import cast_votes, count_votes
from massmerge.recipe import Unknown
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.separation import Separation, separation


@dataclass(frozen=True)
class Rule:
    """What is tried.

    Attributes:
        kin: tasks are kin if they overlap by more than so many times the median of all pairs; infinite if none ever are.
        unsure: a lead below this is none.
        candidates: how many tasks answer an image that stays unclear.
        evidence: what of their heads counts.
        worth: and how much.
    """

    kin: float = 1.5
    unsure: float = 0.3
    candidates: int = 4
    evidence: str = "log-odds"
    worth: float = 0.05


@dataclass(frozen=True)
class Seen:
    """What the looks and the heads say of every row: the mean standardised residuals (n, T) and the heads' words (n, T)."""

    early: Tensor
    deep: Tensor
    heads: dict[str, Tensor]
    lie: Separation
    truth: Tensor
    tasks: list[str]


def gather(bundle: Path, suite: Path, split: str, limit: int) -> Seen:
    """Ask everyone about every row."""
    model = mm.load(bundle, router="projection", check=False)
    stages = model.stages
    if stages.second is None:
        raise InputError(f"{bundle}: no second look in this bundle. It wants images, and `site: auto` in its recipe.")
    ready = prepare_evaluation(bundle, suite, split=split, limit=limit)
    for data in ready.data.values():
        data.read_inputs()
    inputs = [data.inputs[place] for data in ready.data.values() for place in range(len(data))]
    truth = torch.tensor([model.tasks.index(task) for task, data in ready.data.items() for _ in data.rows])
    choice = replace(stages.choice(unknown=Unknown()), top_k=1)
    looks: list[list[Tensor]] = [[], []]
    words: list[list[tuple[float, float]]] = [[] for _ in model.tasks]
    for start in tqdm(range(0, len(inputs), 32), unit="batch"):
        rows = inputs[start : start + 32]
        batch = model.core.batch([model.read(item) for item in rows])
        for votes, look in zip(looks, (stages.first, stages.second), strict=True):
            routings = count_votes(cast_votes(look.voters, look.first_pass(batch), look.router), choice)
            votes.append(torch.tensor([[r.residuals[t] for t in model.tasks] for r in routings]) / len(look.voters))
        for own, task in zip(words, model.tasks, strict=True):
            own += [(p.score or 0.0, p.logit or 0.0) for p in model.predict(rows, task=task, top=1)]
    said = torch.stack([torch.tensor(own) for own in words], 1)
    kept = said[..., 0].double().clamp(1e-9, 1 - 1e-9)
    heads = {
        "probability": said[..., 0],
        "log-odds": (kept / (1 - kept)).log().clamp(-10, 10).float(),
        "logit": said[..., 1],
    }
    bases = [r.bases for r in dict.fromkeys(stages.first.router.routers) if isinstance(r, ProjectionRouter)]
    return Seen(torch.cat(looks[0]), torch.cat(looks[1]), heads, separation(bases), truth, model.tasks)


def chosen(seen: Seen, rule: Rule) -> tuple[Tensor, float, float]:
    """The task (n,) that a rule chooses for each row, the share of rows that it looks at again, and passes for answers."""
    kin = seen.lie.kin(times=rule.kin)
    again = (_lead(seen.early) < rule.unsure) | kin.any(1)[seen.early.argmin(1)]
    vote = torch.where(again[:, None], seen.deep, seen.early)
    ranked = vote.topk(rule.candidates, largest=False)
    words = seen.heads[rule.evidence].gather(1, ranked.indices)
    best = (ranked.values - rule.worth * words).argmin(1, keepdim=True)
    unclear = _lead(vote) < rule.unsure
    task = torch.where(unclear, ranked.indices.gather(1, best)[:, 0], vote.argmin(1))
    passes = 1 + (rule.candidates - 1) * unclear.float().mean().item()
    return task, again.float().mean().item(), passes


def pairs(seen: Seen, count: int = 15) -> list[str]:
    """The pairs of tasks that overlap most, and the median of all."""
    first, second = torch.triu_indices(len(seen.tasks), len(seen.tasks), 1)
    values = seen.lie.overlap[first, second]
    most = values.argsort(descending=True)[:count]
    named = [f"{seen.tasks[first[i]]} and {seen.tasks[second[i]]} {values[i]:.3f}" for i in most]
    return [*named, f"median of {len(values)} pairs {values.median():.3f}"]


def _lead(vote: Tensor) -> Tensor:
    best = vote.topk(2, largest=False).values
    return best[:, 1] - best[:, 0]


NEVER = float("inf")
RULES = [
    Rule(kin=NEVER, candidates=1), Rule(kin=NEVER, candidates=3, evidence="probability", worth=0.5),
    *(Rule(kin=kin) for kin in (NEVER, 1.2, 1.4, 1.5, 1.6, 1.8)),
    *(Rule(candidates=count) for count in (1, 2, 3, 5)),
    *(Rule(worth=worth) for worth in (0.02, 0.03, 0.04, 0.06, 0.08, 0.1)),
    *(Rule(evidence="probability", worth=worth) for worth in (0.25, 0.5, 1.0)),
    *(Rule(evidence="logit", worth=worth) for worth in (0.05, 0.1)),
    *(Rule(unsure=unsure) for unsure in (0.1, 0.2, 0.5)),
]  # fmt: skip


def main() -> None:
    """Gather, try, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--limit", type=int, default=40, help="rows of each task")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    seen = gather(options.bundle, options.suite, options.split, options.limit)
    print("overlap at the voting sites:", *pairs(seen), sep="\n  ")
    found = []
    print(f"{'kin':>5}{'unsure':>8}{'candidates':>12}  {'evidence':<12}{'worth':>6}"
          f"{'all':>8}{'half':>7}{'other':>7}{'again':>8}{'passes':>8}")  # fmt: skip
    for rule in RULES:
        task, again, passes = chosen(seen, rule)
        right = (task == seen.truth).float()
        shares = [100 * right[rows].mean().item() for rows in (slice(None), seen.truth % 2 == 0, seen.truth % 2 == 1)]
        found.append({"rule": vars(rule), "routing": shares, "again": again, "passes": passes})
        print(f"{rule.kin:5.1f}{rule.unsure:8.1f}{rule.candidates:12}  {rule.evidence:<12}{rule.worth:6.2f}"
              f"{shares[0]:8.1f}{shares[1]:7.1f}{shares[2]:7.1f}{again:8.2f}{passes:8.2f}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
