"""The base of a bundle without weights, once all that the tasks store has been found to fit it."""

from __future__ import annotations

from massmerge.bundle.factors import refuse_misfits
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import Source
from massmerge.checkpoints.backbone import load_config
from massmerge.checkpoints.skeleton import Skeleton, build


def fitting_skeleton(bundle: Bundle) -> Skeleton:
    """The base's modules and slots.

    Raises:
        InputError: labels are none, or factors do not fit the base: checksums tell nothing of who wrote them.
    """
    said = bundle.manifest["base"]
    tasks = {task.name: bundle.task_file(task.name) for task in bundle.tasks}
    skeleton = build(load_config(Source(said["source"], bundle.base_folder)), said["class"])
    refuse_misfits(tasks, skeleton.slots)
    return skeleton
