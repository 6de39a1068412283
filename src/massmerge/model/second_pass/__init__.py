"""Modules that run the base plus the low-rank update of the selected sets, for a batch of mixed tasks in one pass."""

from massmerge.model.second_pass.install import SecondPass
from massmerge.model.second_pass.updates import Change, LowRankChange, SetChanges, Variant

__all__ = ["Change", "LowRankChange", "SecondPass", "SetChanges", "Variant"]
