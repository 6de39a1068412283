"""Experiments that can be asked for by name: one file each, one line in this dictionary."""

from massmerge.research.studies.ablation import ABLATION
from massmerge.research.studies.batch import BATCH
from massmerge.research.studies.layers import LAYERS
from massmerge.research.studies.leave_one_out import LEAVE_ONE_OUT
from massmerge.research.studies.methods import METHODS
from massmerge.research.studies.oracle import ORACLE
from massmerge.research.studies.redundancy import REDUNDANCY
from massmerge.research.studies.routers import ROUTERS
from massmerge.research.studies.scaling import SCALING
from massmerge.research.studies.storage import STORAGE
from massmerge.research.studies.study import Study
from massmerge.research.studies.sweep import SWEEP

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        METHODS, LAYERS, ROUTERS, REDUNDANCY, SWEEP, ABLATION, BATCH, SCALING, LEAVE_ONE_OUT, ORACLE, STORAGE,
    )
}  # fmt: skip
