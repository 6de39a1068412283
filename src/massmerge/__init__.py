"""One backbone and many fine-tuned experts of it, as one bundle that finds the task by itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massmerge.bundle.reader import Bundle
    from massmerge.errors import InputError, MassError, Problem
    from massmerge.evaluation.evaluate import evaluate
    from massmerge.evaluation.results import Evaluation
    from massmerge.evaluation.suite import Suite
    from massmerge.merging.change import add, remove
    from massmerge.merging.open_recipe import make_plan
    from massmerge.merging.plan import Plan
    from massmerge.merging.run import merge
    from massmerge.model.answers import Answer, Generation, Prediction, Routing
    from massmerge.model.load import load
    from massmerge.model.model import Model
    from massmerge.model.static import StaticModel
    from massmerge.recipe import Recipe

__version__ = "0.1.0"
__all__ = [
    "Answer", "Bundle", "Evaluation", "Generation", "InputError", "MassError", "Model", "Plan", "Prediction", "Problem",
    "Recipe", "Routing", "StaticModel", "Suite", "__version__", "add", "evaluate", "load", "make_plan", "merge",
    "remove",
]  # fmt: skip

# Where each name lives. torch and transformers take seconds to import; who asks for a version or for help need not wait.
_HOMES = {
    "model.answers": ("Answer", "Generation", "Prediction", "Routing"),
    "bundle.reader": ("Bundle",),
    "merging.change": ("add", "remove"),
    "errors": ("InputError", "MassError", "Problem"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.results": ("Evaluation",),
    "evaluation.suite": ("Suite",),
    "merging.run": ("merge",),
    "model.load": ("load",),
    "model.model": ("Model",),
    "merging.plan": ("Plan",),
    "merging.open_recipe": ("make_plan",),
    "recipe": ("Recipe",),
    "model.static": ("StaticModel",),
}


def __getattr__(name: str) -> Any:
    """A public name, from its module, which is imported then."""
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"massmerge.{home}"), name)
            return value
    raise AttributeError(f"module 'massmerge' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return __all__
