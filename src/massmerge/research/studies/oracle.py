"""`oracle`: MASS and SMILE where the head is given."""

from __future__ import annotations

from massmerge.bundle.reader import Bundle
from massmerge.evaluation.report import Part, Picture, Table, Text
from massmerge.evaluation.summary import percent
from massmerge.research.studies import plots
from massmerge.research.studies.compared import Answered, mass_answers
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured
from massmerge.research.studies.methods import peer_answers
from massmerge.research.studies.study import TIMED, Finding, Study, Verdict

MASS = "mass"
_PEERS, _QUICK = ("smile_1", "smile_2"), ("smile_1",)


def run(context: StudyContext) -> Finding:
    """Answer every sample by MASS and by SMILE, each with the head that it chooses and with the true one."""
    size = Bundle(context.bundle, check=False).counted_bytes
    found = {MASS: mass_answers(context, lambda: context.model, {}, size)[0]}
    sources = context.sources
    for name in _PEERS:
        if context.settings.quick and name not in _QUICK and not context.settings.peer(name):
            continue
        found[name] = peer_answers(context, sources, name)
    chosen, given = ({name: one.measure(context, given=flag) for name, one in found.items()} for flag in (False, True))
    rows = [
        {"method": name, "head_chosen": chosen[name].plain(), "head_given": given[name].plain(), "bytes": one.nbytes}
        for name, one in found.items()
    ]
    return Finding(rows, _verdict(found, chosen, given), _sentences(chosen, given), _parts(context, chosen, given))


def _verdict(found: dict[str, Answered], chosen: dict[str, Measured], given: dict[str, Measured]) -> Verdict:
    best = max(given, key=lambda name: given[name].mean)
    why = ""
    if given[best].mean > given[MASS].mean:
        gaps = {task: given[best].tasks[task] - value for task, value in given[MASS].tasks.items()}
        most = sorted(gaps, key=lambda task: -gaps[task])[:3]
        why = (
            f"It is lost most on {', '.join(f'{task} ({100 * gaps[task]:.1f} points)' for task in most)}: an input that is "
            "sent to another task is merged for that task, and the true head reads what it was not trained on; tokens of "
            f"one layer can still go to the right expert. {best} weighs {found[best].nbytes / found[MASS].nbytes:.2f} times "
            f"as much. Without the head given, MASS has {percent(chosen[MASS].mean)}, {best} {percent(chosen[best].mean)}."
        )
    margin = max(given[best].margin, given[MASS].margin)
    return Verdict(
        "accuracy with the head given, mean over the tasks", best, given[best].mean, MASS, given[MASS].mean, margin, why
    )


def _sentences(chosen: dict[str, Measured], given: dict[str, Measured]) -> list[str]:
    return [
        f"{name}: {percent(given[name].mean)} with the head given, {percent(chosen[name].mean)} with the head that it "
        f"chooses; choosing costs {100 * (given[name].mean - chosen[name].mean):.1f} points."
        for name in given
    ]


def _parts(context: StudyContext, chosen: dict[str, Measured], given: dict[str, Measured]) -> list[Part]:
    lines = [
        [f"{name}, head {how}", percent(one.mean), "-" if one.deviation is None else f"{100 * one.deviation:.1f}",
         percent(one.normalised), *(percent(one.tasks[task]) for task in context.measured)]
        for name in given
        for how, one in (("given", given[name]), ("chosen", chosen[name]))
    ]  # fmt: skip
    words = (
        "Head given: the method routes as usual, then the head of the true task answers. That is not MASS with "
        "the task given, "
        "which would merge for that task too."
    )
    bars = {f"{name}, head {how}": (one.mean, one.margin)
            for name in given for how, one in (("given", given[name]), ("chosen", chosen[name]))}  # fmt: skip
    caption = "Accuracy with the head given and with the head that the method chooses, with its 95 % interval."
    return [Table(["method", "mean", "±", "normalised", *context.measured], lines), Text(words),
            Picture("oracle", caption, plots.ranked_bars(bars, f"{MASS}, head given"))]  # fmt: skip


ORACLE = Study(
    "oracle", "MASS and SMILE with the true head",
    "How do MASS and SMILE compare where the head is given, as papers before MASS evaluate? Both route as usual; "
    "the head of the true task answers.",
    run, lambda context: context.seconds_for(2.0 + 2.5 * len(_PEERS)) + 30, needs_recipe=True, here=TIMED, peers=_PEERS,
    not_for_texts="it compares answers by the head that is chosen with those by the head that is given.",
)  # fmt: skip
