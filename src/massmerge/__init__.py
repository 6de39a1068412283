"""One backbone and many fine-tuned experts of it, as one bundle that finds the task by itself."""

__version__ = "0.1.0"

from massmerge.answers import Answer, Generation, Prediction, Routing
from massmerge.bundle import Bundle
from massmerge.errors import InputError, MassError, Problem
from massmerge.evaluation.evaluate import evaluate
from massmerge.evaluation.results import Evaluation
from massmerge.evaluation.suite import Suite
from massmerge.merge import merge
from massmerge.model import Model, load
from massmerge.plan import Plan
from massmerge.prepare import make_plan
from massmerge.recipe import Recipe
from massmerge.static_model import StaticModel

__all__ = [
    "Answer", "Bundle", "Evaluation", "Generation", "InputError", "MassError", "Model", "Plan", "Prediction", "Problem",
    "Recipe", "Routing", "StaticModel", "Suite", "__version__", "evaluate", "load", "make_plan", "merge",
]  # fmt: skip
