"""A Bayesian search for η, K, ε and the site on the split `validation`, confirmed on the measured rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from massmerge.errors import MassError
from massmerge.evaluation.report import Part, Picture, Table
from massmerge.evaluation.studies import plots
from massmerge.evaluation.studies.book import AnswerBook
from massmerge.evaluation.studies.context import StudyContext
from massmerge.evaluation.studies.figures import Measured, measure_answers
from massmerge.evaluation.studies.fixed import accepted_tasks
from massmerge.evaluation.studies.layers import all_voters, site_scores
from massmerge.evaluation.studies.redundancy import pass_scores
from massmerge.evaluation.studies.scores import routings_of, shipped_residuals, weights_of
from massmerge.evaluation.summary import percent
from massmerge.recipe import Redundancy
from massmerge.routing import Voter, vote

VOTE = "vote"
BASE = "base"
_FIXED = (0.1, 0.3, 0.5, 0.7, 0.9)
_SETS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Searched:
    """What a search found."""

    rows: list[dict[str, Any]]
    """Every trial on the split `validation`."""
    best: dict[str, Any]
    """The setting of the best trial."""
    default: dict[str, Any]
    """Figures of the bundle's own setting on the measured rows."""
    found: dict[str, Any]
    """Figures of the best trial's setting on the measured rows."""
    samples: int
    trials: int


def require_optuna() -> None:
    """Refuse before any work what could not be done.

    Raises:
        MassError: optuna is missing.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise MassError("--search needs optuna: pip install 'massmerge[eval]'.") from None


def search(context: StudyContext, trials: int) -> Searched:
    """Search on the split `validation`, then measure the best setting and the default on the study's own rows."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    validation = context.validation
    sampler = optuna.samplers.TPESampler(seed=context.settings.seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    default = default_setting(context)
    study.enqueue_trial(default)  # a search that does not know the default could only be worse by chance
    rows: list[dict[str, Any]] = []

    def objective(trial: Any) -> float:
        """Accuracy of one setting on the validation rows."""
        setting = {
            "threshold": trial.suggest_float("threshold", 0.05, 0.5),
            "top_k": trial.suggest_categorical("top_k", [k for k in _SETS if k <= len(context.tasks)]),
            "first_pass": trial.suggest_categorical("first_pass", [BASE, *(f"fixed {e:g}" for e in _FIXED)]),
            "site": trial.suggest_categorical("site", [VOTE, *(voter.name for voter in all_voters(context))]),
        }
        found = evaluate_setting(validation, setting)
        rows.append({"trial": trial.number, "split": "validation", **setting, **found.plain()})
        return found.mean

    for _ in context.progress(range(trials), "search", trials):
        study.optimize(objective, n_trials=1)
    best = dict(study.best_params)
    ours, theirs = (evaluate_setting(context, setting).plain() for setting in (default, best))
    return Searched(rows, best, ours, theirs, len(validation.samples), trials)


def default_setting(context: StudyContext) -> dict[str, Any]:
    """The bundle's own setting, as the search knows it."""
    options = context.runtime.recipe
    first = BASE
    if options.router.first_pass == "fixed" and isinstance(options.merge.redundancy, Redundancy):
        wanted = options.merge.redundancy.threshold
        first = f"fixed {min(_FIXED, key=lambda threshold: abs(threshold - wanted)):g}"
    return {"threshold": min(0.5, max(0.05, options.router.threshold)), "top_k": context.runtime.top_k,
            "first_pass": first, "site": VOTE}  # fmt: skip


def evaluate_setting(context: StudyContext, setting: dict[str, Any]) -> Measured:
    """Figures of the answers with one setting; passes and answers that other settings needed too are not run again."""
    voters = _voters(context, setting["site"])
    everything = all_voters(context)
    if setting["first_pass"] == BASE:
        scores = site_scores(context, everything)["projection"]
    else:
        threshold = float(setting["first_pass"].split()[1])
        accepted = accepted_tasks(context, Redundancy(threshold=threshold))
        scores = pass_scores(context, accepted, everything)["projection"]
    shipped = setting["first_pass"] == BASE and setting["site"] == VOTE
    residuals = shipped_residuals(context, scores) if shipped else vote([scores[voter.name] for voter in voters])
    weights = weights_of(context, residuals)
    routings = routings_of(context, weights, setting["threshold"], setting["top_k"])
    return measure_answers(context, AnswerBook(context, context.runtime).answers(routings))


def _voters(context: StudyContext, site: str) -> list[Voter]:
    if site == VOTE:
        return context.runtime.voters
    return [voter for voter in all_voters(context) if voter.name == site]


def search_sentences(found: Searched) -> list[str]:
    """What the search found, in words."""
    best = max(found.rows, key=lambda row: row["mean"])
    return [
        f"The search of {found.trials} settings on {found.samples:,} rows of the split validation found "
        f"{_setting(found.best)}: {percent(best['mean'])} there, against {percent(found.rows[0]['mean'])} of the default.",
        f"On the measured rows that setting gives {percent(found.found['mean'])}, the default "
        f"{percent(found.default['mean'])}.",
    ]


def _setting(setting: dict[str, Any]) -> str:
    return f"η {setting['threshold']:.2f}, K {setting['top_k']}, first pass {setting['first_pass']}, site {setting['site']}"


def search_parts(found: Searched) -> list[Part]:
    """The best trials, and how the best so far rose."""
    ranked = sorted(found.rows, key=lambda row: -row["mean"])[:10]
    lines = [
        [str(row["trial"]), f"{row['threshold']:.2f}", str(row["top_k"]), row["first_pass"], row["site"],
         percent(row["mean"])]
        for row in ranked
    ]  # fmt: skip
    headers = ["trial", "η", "K", "first pass", "site", "accuracy, validation"]
    so_far = [max(row["mean"] for row in found.rows[: at + 1]) for at in range(len(found.rows))]
    series = {"best so far": so_far, "each trial": [row["mean"] for row in found.rows]}
    figure = plots.trial_curve(series)
    return [
        Table(headers, lines),
        Picture("sweep-search", "Accuracy on the split validation, trial by trial; trial 0 is the default.", figure),
    ]
