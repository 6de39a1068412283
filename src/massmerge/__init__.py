"""One backbone and many fine-tuned experts of it, as one bundle that finds the task by itself."""

__version__ = "0.1.0"

from massmerge.bundle import Bundle
from massmerge.errors import InputError, MassError, Problem
from massmerge.merge import merge
from massmerge.plan import Plan, make_plan
from massmerge.recipe import Recipe

__all__ = ["Bundle", "InputError", "MassError", "Plan", "Problem", "Recipe", "__version__", "make_plan", "merge"]
