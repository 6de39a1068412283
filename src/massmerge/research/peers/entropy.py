"""Test-time adaptation: parameters are moved so that heads are surer of unlabelled inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from massmerge.model.core import Core
from massmerge.model.inputs import Row
from massmerge.recipe import ProblemType
from massmerge.research.peers.peer import Inputs
from massmerge.research.peers.votes import Pass, running


def entropy(logits: Tensor, problem: ProblemType = "single_label_classification") -> Tensor:
    """Mean entropy of the predictions of logits (batch, labels); of a multi-label head the sum over its labels."""
    if problem == "multi_label_classification":  # each label is there or not, as a class of logit x is against one of 0
        pairs = torch.stack([logits, torch.zeros_like(logits)], -1)
        return -(pairs.softmax(-1) * pairs.log_softmax(-1)).sum((1, 2)).mean()
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def minimise_entropy(
    core: Core,
    tree: nn.Module,
    parameters: list[nn.Parameter],
    inputs: Inputs,
    *,
    steps: Iterable[int],
    batch_size: int,
    rate: float,
    seed: int,
) -> None:
    """Adapt parameters, in place, by Adam; each step is on one batch of every task, through the task's own head.

    Args:
        core: reader and heads.
        tree: the backbone that the parameters are in.
        parameters: what is adapted.
        inputs: unlabelled inputs of each task; they are drawn with replacement.
        steps: one item for each step.
        batch_size: inputs of each task in a step.
        rate: of learning.
        seed: of the draw.
    """
    rows = {task: [core.reader.row(item) for item in inputs[task]] for task in core.tasks}
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in steps:
        optimizer.zero_grad()
        for task, own in rows.items():
            chosen = torch.randint(len(own), (batch_size,), generator=draws).tolist()
            logits = _logits(core, tree, task, [own[i] for i in chosen])
            problem = core.problems.get(task, "single_label_classification")  # words are classes too
            if problem != "regression":  # there is nothing to be unsure of a number
                entropy(logits, problem).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _logits(core: Core, tree: nn.Module, task: str, rows: list[Row]) -> Tensor:
    """Logits of one task's head, or over the first word that is written; gradients are kept.

    All inputs have the mean of their gates.
    """
    decoder = core.writes and not getattr(core.base.config, "is_encoder_decoder", False)
    batch = core.reader.batch(rows, left=decoder)  # a decoder's word follows the last token
    call = core.call(batch)
    with torch.enable_grad(), running(Pass(len(rows), batch.get("attention_mask"), shared=True)):
        output = tree(**call)
        return output.logits[:, -1] if core.writes else core.heads[task].logits(output, batch)
