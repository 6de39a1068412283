"""Experiments that can be asked for by name: one file each, one line in this dictionary."""

from massmerge.evaluation.studies.layers import LAYERS
from massmerge.evaluation.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in (LAYERS,)}
