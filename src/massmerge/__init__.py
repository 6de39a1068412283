"""One backbone and many fine-tuned experts of it, as one bundle that finds the task by itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massmerge.bundle.download import pull_bundle as pull
    from massmerge.bundle.inspect import Inspection
    from massmerge.bundle.inspect import inspect_bundle as inspect
    from massmerge.bundle.reader import Bundle
    from massmerge.bundle.upload import Push
    from massmerge.bundle.upload import push_bundle as push
    from massmerge.errors import InputError, MassError, Problem
    from massmerge.evaluation.evaluate import evaluate
    from massmerge.evaluation.results import Evaluation
    from massmerge.evaluation.scales import choose_scale
    from massmerge.evaluation.suite import Suite
    from massmerge.merging.change import add, remove
    from massmerge.merging.heads.make import make_head as head
    from massmerge.merging.open_recipe import make_plan
    from massmerge.merging.plan import Plan
    from massmerge.merging.run import merge
    from massmerge.merging.verify import Verification
    from massmerge.merging.verify import verify_bundle as verify
    from massmerge.model.adapt import adapt
    from massmerge.model.answers import Answer, Generation, Prediction, Routing
    from massmerge.model.calibrate import calibrate
    from massmerge.model.explain import Explanation, explain
    from massmerge.model.export.run import export_bundle as export
    from massmerge.model.load import load
    from massmerge.model.model import Model
    from massmerge.model.pipeline import Pipeline, pipeline
    from massmerge.model.predictor import Predictor
    from massmerge.model.static import StaticModel
    from massmerge.recipe import Recipe
    from massmerge.research.interpret.decoding import interpret
    from massmerge.research.studies.run import study
    from massmerge.routing.sessions import Sessions

__version__ = "0.1.0"
__all__ = [
    "Answer", "Bundle", "Evaluation", "Explanation", "Generation", "InputError", "Inspection", "MassError", "Model",
    "Pipeline", "Plan", "Prediction", "Predictor", "Problem", "Push", "Recipe", "Routing", "Sessions", "StaticModel",
    "Suite", "Verification", "__version__", "adapt", "add", "calibrate", "choose_scale", "evaluate", "explain", "export",
    "head", "inspect", "interpret", "load", "make_plan", "merge", "pipeline", "pull", "push", "remove", "study", "verify",
]  # fmt: skip

# Where each name lives, so that `mass --version` and `mass -h` need not wait seconds for torch and transformers.
_HOMES = {
    "bundle.inspect": ("Inspection",),
    "bundle.reader": ("Bundle",),
    "bundle.upload": ("Push",),
    "errors": ("InputError", "MassError", "Problem"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.results": ("Evaluation",),
    "evaluation.scales": ("choose_scale",),
    "evaluation.suite": ("Suite",),
    "merging.change": ("add", "remove"),
    "merging.open_recipe": ("make_plan",),
    "merging.plan": ("Plan",),
    "merging.run": ("merge",),
    "merging.verify": ("Verification",),
    "model.adapt": ("adapt",),
    "model.answers": ("Answer", "Generation", "Prediction", "Routing"),
    "model.calibrate": ("calibrate",),
    "model.explain": ("Explanation", "explain"),
    "model.load": ("load",),
    "model.model": ("Model",),
    "model.pipeline": ("Pipeline", "pipeline"),
    "model.predictor": ("Predictor",),
    "model.static": ("StaticModel",),
    "recipe": ("Recipe",),
    "research.interpret.decoding": ("interpret",),
    "research.studies.run": ("study",),
    "routing.sessions": ("Sessions",),
}
# Verbs whose function has a longer name at home, where the verb alone would say too little.
_VERBS = {
    "export": ("model.export.run", "export_bundle"),
    "head": ("merging.heads.make", "make_head"),
    "inspect": ("bundle.inspect", "inspect_bundle"),
    "pull": ("bundle.download", "pull_bundle"),
    "push": ("bundle.upload", "push_bundle"),
    "verify": ("merging.verify", "verify_bundle"),
}
_PLACES = {name: (home, name) for home, names in _HOMES.items() for name in names} | _VERBS


def __getattr__(name: str) -> Any:
    """A public name, from its module, which is imported then."""
    if name not in _PLACES:
        raise AttributeError(f"module 'massmerge' has no attribute {name!r}")
    home, own = _PLACES[name]
    value = globals()[name] = getattr(import_module(f"massmerge.{home}"), own)
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
