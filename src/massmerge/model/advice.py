"""What to do about tasks that a router confuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from massmerge.model.estimate import Estimate

_GOOD = 0.95
_WEAK = 0.9
_MANY = 400  # inputs a task from which more of them gain little; see docs/research/routing.md
_OFTEN = 0.1


def advise(
    inputs: Mapping[str, int], before: Estimate, after: Estimate | None, shared_labels: Sequence[Sequence[str]]
) -> list[str]:
    """Sentences that say what to do next; none where routing is good.

    Args:
        inputs: how many inputs of each task there were.
        before: what to expect without calibration.
        after: what to expect with it, if that could be estimated.
        shared_labels: groups of `task/label` that mean the same already.
    """
    if after is None:
        return ["Give two or more inputs of every task: with one, nothing can be left out to estimate the accuracy."]
    found = []
    if after.mean.value <= before.mean.value:
        found.append('Calibration gains nothing on these inputs; `router="projection"` of `load` routes without it.')
    weak = [task for task, figure in after.tasks.items() if figure.value < _WEAK and inputs[task] < _MANY]
    if weak and after.mean.value < _GOOD:
        found.append(f"Give more inputs of {', '.join(weak)} (up to {_MANY} each).")
    known = [{name.partition("/")[0] for name in group} for group in shared_labels]
    for pair in after.confused:
        if pair.share < _OFTEN or any({pair.task, pair.other} <= group for group in known):
            continue
        found.append(
            f"{100 * pair.share:.0f} % of {pair.task} goes to {pair.other}: if labels of both mean the same, list them "
            f"under `shared_labels`; if a caller needs only one of the two, name its tasks (`task=`)."
        )
    if after.mean.value < _GOOD:
        found.append("If inputs come in groups of one task, say so (`session=`): eight inputs decide better than one.")
    return found
