"""One backbone and many fine-tuned experts of it, as one bundle that finds the task by itself."""

__version__ = "0.1.0"

from massmerge.answers import Answer, Prediction, Routing
from massmerge.bundle import Bundle
from massmerge.errors import InputError, MassError, Problem
from massmerge.merge import merge
from massmerge.model import Model, load
from massmerge.plan import Plan
from massmerge.prepare import make_plan
from massmerge.recipe import Recipe

__all__ = [
    "Answer", "Bundle", "InputError", "MassError", "Model", "Plan", "Prediction", "Problem", "Recipe", "Routing",
    "__version__", "load", "make_plan", "merge",
]  # fmt: skip
