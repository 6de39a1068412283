"""A Bayesian search for η, K, ε and the site on the split `validation`, confirmed on the measured rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from massmerge.errors import MassError
from massmerge.evaluation.report import Part, Picture, Table
from massmerge.evaluation.summary import percent
from massmerge.recipe import Redundancy
from massmerge.research.studies import plots
from massmerge.research.studies.book import AnswerBook
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, measure_answers
from massmerge.research.studies.fixed import Accepted, accepted_tasks, own_accepted, pass_scores
from massmerge.research.studies.layers import all_voters
from massmerge.research.studies.shipped import looks_of, routed, shipped_routings

VOTE = "vote"
BASE, OWN_FIXED = "base", "fixed"
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
    own = default_setting(context)
    sizes = sorted({k for k in (*_SETS, own["top_k"]) if k <= len(context.tasks)})
    passes = list(dict.fromkeys([own["first_pass"], BASE, *(f"fixed {e:g}" for e in _FIXED)]))
    study.enqueue_trial(own)  # a search that does not know the default could only be worse by chance
    rows: list[dict[str, Any]] = []

    def objective(trial: Any) -> float:
        """Accuracy of one setting on the validation rows."""
        setting = {
            "threshold": trial.suggest_float("threshold", min(0.05, own["threshold"]), max(0.5, own["threshold"])),
            "top_k": trial.suggest_categorical("top_k", sizes),
            "first_pass": trial.suggest_categorical("first_pass", passes),
            "site": trial.suggest_categorical("site", [VOTE, *(voter.name for voter in all_voters(context))]),
        }
        found = evaluate_setting(validation, setting)
        rows.append({"trial": trial.number, "split": "validation", **setting, **found.plain()})
        return found.mean

    for _ in context.progress(range(trials), "search", trials):
        study.optimize(objective, n_trials=1)
    best = dict(study.best_params)
    ours, theirs = (evaluate_setting(context, setting).plain() for setting in (own, best))
    return Searched(rows, best, ours, theirs, len(validation.samples), trials)


def default_setting(context: StudyContext) -> dict[str, Any]:
    """The bundle's own setting, as the search knows it."""
    options = context.model.stages.options
    return {"threshold": options.threshold, "top_k": min(context.model.top_k, len(context.tasks)),
            "first_pass": OWN_FIXED if options.first_pass == "fixed" else BASE, "site": VOTE}  # fmt: skip


def evaluate_setting(context: StudyContext, setting: dict[str, Any]) -> Measured:
    """Figures of the answers with one setting; passes and answers that other settings needed too are not run again."""
    model = context.with_options(router={"threshold": setting["threshold"], "top_k": setting["top_k"]})
    book = AnswerBook(context, model)
    if (setting["first_pass"], setting["site"]) == (default_setting(context)["first_pass"], VOTE):
        return measure_answers(context, book.answers(shipped_routings(context, model=model)))
    voters = model.stages.voters
    if setting["site"] != VOTE:
        voters = [voter for voter in all_voters(context) if voter.name == setting["site"]]
    scores = pass_scores(context, _accepted(context, setting["first_pass"]), all_voters(context))
    routings = book.settled(routed(model.stages, looks_of(scores, voters)))
    return measure_answers(context, book.answers(routings))


def _accepted(context: StudyContext, first_pass: str) -> Accepted | None:
    """Which tasks the fixed model of a setting is made of; none for the base."""
    if first_pass in (BASE, OWN_FIXED):
        return None if first_pass == BASE else own_accepted(context)
    return accepted_tasks(context, Redundancy(threshold=float(first_pass.split()[1])))


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
