"""What a router could reach that is *given* the task of many inputs: `python benchmarks/router_bound.py BUNDLE SUITE`.

A linear classifier of tasks is fitted on activations of the base (mean of the tokens, and the class token of images, before
four blocks) of training rows whose task is given, and judged on validation rows. No data-free router sees any of that, so
this is a mark to measure them by, not a rival.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import massmerge as mm
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.model.route.first_pass import FirstPass, Voter

PENALTY = 1e-3


def activations(bundle: Path, suite: Path, split: str, limit: int) -> tuple[Tensor, Tensor]:
    """Activations (rows, width) of a split's rows, and the position of each row's task."""
    model = mm.load(bundle, router="projection", check=False)
    blocks = [site for site in model.sites if site.name[0] == "A" and site.name[1:].isdigit()]
    places = [blocks[round(i * (len(blocks) - 1) / 3)] for i in range(4)]
    tokens = ("cls", "mean") if model.takes_images else ("mean",)
    first = FirstPass(model.core.base, [Voter(site, token) for site in places for token in tokens])
    ready = prepare_evaluation(bundle, suite, split=split, limit=limit)
    for data in ready.data.values():
        data.read_inputs()
    rows = [
        model.core.reader.row(x) for data in ready.data.values() for x in (data.inputs[i] for i in range(len(data)))
    ]
    truth = torch.tensor([model.tasks.index(task) for task, data in ready.data.items() for _ in data.rows])
    order = sorted(range(len(rows)), key=lambda i: max(t.shape[0] for t in rows[i].values()))  # little padding
    found = []
    for start in tqdm(range(0, len(rows), 32), desc=split, unit="batch"):
        seen = first(model.core.batch([rows[i] for i in order[start : start + 32]]))
        found.append(torch.cat([a.pooled() for a in seen], 1))
    return torch.cat(found)[torch.tensor(order).argsort()], truth


def accuracy(train: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor]) -> float:
    """Share of the judged rows that a linear classifier of the training rows sends to their task."""
    (x, y), (z, truth) = train, judged
    mean, spread = x.mean(0), x.std(0) + 1e-6
    x, z = (x - mean) / spread, (z - mean) / spread
    weight = torch.zeros(x.shape[1], int(y.max()) + 1, requires_grad=True)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=100)

    def loss() -> Tensor:
        solver.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight + bias, y) + PENALTY * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)  # type: ignore[arg-type]
    return float(((z @ weight + bias).argmax(1) == truth).float().mean())


def first_rows(train: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """At most so many rows of each task."""
    x, y = train
    kept = torch.cat([(y == task).nonzero()[:count, 0] for task in y.unique()])
    return x[kept], y[kept]


def main() -> None:
    """Gather, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--train", type=int, nargs="+", default=[16, 64, 400], help="training rows of each task")
    parser.add_argument("--limit", type=int, default=100, help="validation rows of each task")
    options = parser.parse_args()
    train = activations(options.bundle, options.suite, "train", max(options.train))
    judged = activations(options.bundle, options.suite, "validation", options.limit)
    for count in options.train:
        print(f"{count:>5} rows of each task, their task given: {accuracy(first_rows(train, count), judged):.1%}")


if __name__ == "__main__":
    main()
