"""Experiments that can be asked for by name: one file each, one line in this dictionary."""

from massmerge.evaluation.studies.ablation import ABLATION
from massmerge.evaluation.studies.batch import BATCH
from massmerge.evaluation.studies.layers import LAYERS
from massmerge.evaluation.studies.leave_one_out import LEAVE_ONE_OUT
from massmerge.evaluation.studies.methods import METHODS
from massmerge.evaluation.studies.oracle import ORACLE
from massmerge.evaluation.studies.redundancy import REDUNDANCY
from massmerge.evaluation.studies.routers import ROUTERS
from massmerge.evaluation.studies.scaling import SCALING
from massmerge.evaluation.studies.storage import STORAGE
from massmerge.evaluation.studies.study import Study
from massmerge.evaluation.studies.sweep import SWEEP

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        METHODS, LAYERS, ROUTERS, REDUNDANCY, SWEEP, ABLATION, BATCH, SCALING, LEAVE_ONE_OUT, ORACLE, STORAGE,
    )
}  # fmt: skip
