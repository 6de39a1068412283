"""`methods`: the main table. Every way to make one model of the experts, on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.evaluation.from_recipe import open_answering
from massmerge.evaluation.plots import radar
from massmerge.evaluation.report import Picture, Table, Text
from massmerge.evaluation.summary import percent
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.static import KEEPING_METHODS, STATIC_METHODS
from massmerge.model.unrouted import OneBackbone
from massmerge.research.peers import PEERS, Inputs
from massmerge.research.studies import plots
from massmerge.research.studies.compared import Answered, answers_of, mass_answers, measure_tasks
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.figures import Measured, summarize
from massmerge.research.studies.sceptic import base_routed, standardised_choice, static_routed
from massmerge.research.studies.statics import SCALE_ROWS, StaticMerge
from massmerge.research.studies.study import TIMED, Finding, Study, Verdict

MASS, TASK_GIVEN = "mass", "mass, task given"
BASE_ROUTED, _ROUTED_STATIC = "base, routed", "static merge, our router"
BASE, EXPERTS = "base", "experts"
_SUPPORT = 64  # unlabelled inputs of each task, for peers that train something
_TRAINED = ("wemoe", "twin")
_TEXT_OPTIONS = {"smile_1": {"gate": 4, "rank": 16}}  # the paper's for language models
_QUICK_STATICS, _QUICK_PEERS = ("task_arithmetic", "tsv_m"), ("smile_1",)
_KINDS = {
    BASE: "the pretrained model", EXPERTS: "fine-tuned, one model per task", MASS: "routed",
    TASK_GIVEN: "routed, task given", BASE_ROUTED: "the pretrained model, our router",
}  # fmt: skip


@dataclass(frozen=True)
class MethodRow:
    """One line of the table."""

    name: str
    kind: str
    free: Measured | None
    """Without the task's name; none where a method has no answer then."""
    given: Measured | None
    nbytes: int
    milliseconds: float | None
    scale: float | None = None
    chosen: bool = False
    fair: Measured | None = None
    """Without the task's name, logits standardised per head; only where heads are compared by their logits."""

    def plain(self, base: int) -> dict[str, Any]:
        """The figures that repeat, as plain data."""
        return {
            "method": self.name, "kind": self.kind, "scale": self.scale, "scale_chosen_on_validation": self.chosen,
            "task_unknown": self.free.plain() if self.free else None,
            "task_unknown_standardised": self.fair.plain() if self.fair else None,
            "task_given": self.given.plain() if self.given else None, "bytes": self.nbytes,
            "of_the_base": round(self.nbytes / base, 4),
        }  # fmt: skip


def run(context: StudyContext) -> Finding:
    """Answer every sample by every method, without and with its task."""
    base = Bundle(context.bundle, check=False).base_bytes
    notes: list[str] = []
    rows = list(method_rows(context, notes))
    times = [{"method": row.name, "milliseconds": row.milliseconds} for row in rows]
    words = _TEXT_WORDS if context.ready.writes else _WORDS
    parts = [_table(rows, base), Text(words), *_task_tables(context, rows), *_pictures(context, rows)]
    sentences = _sentences(rows, base, writes=context.ready.writes)
    return Finding([row.plain(base) for row in rows], _verdict(context, rows), sentences, parts, times, notes)


def method_rows(context: StudyContext, notes: list[str]) -> Iterator[MethodRow]:
    """The lines of the table; what is left out of it is said in `notes`."""
    sources = context.sources
    yield _measured(context, BASE, answers_of(context, BASE, {}, lambda: _base(sources)))
    quick = context.settings.quick
    statics = [static_row(context, method) for method in (_QUICK_STATICS if quick else STATIC_METHODS)]
    yield from statics
    for method in () if quick else KEEPING_METHODS:
        yield static_row(context, method)
    yield from _one_pass_rows(context, statics, notes)
    yield from _peer_rows(context, sources, notes)
    yield from mass_rows(context)
    yield _experts(context, sources)


def static_row(context: StudyContext, method: str) -> MethodRow:
    """The line of a static merge."""
    found = StaticMerge(context, method).answers()
    kind = "task given" if method in KEEPING_METHODS else "static merge"
    return _measured(context, method, found.answered, kind, found.scale, found.chosen)


def _one_pass_rows(context: StudyContext, statics: list[MethodRow], notes: list[str]) -> Iterator[MethodRow]:
    """What a sceptic would ship: the base, and the best static merge, with the same heads and our router."""
    if context.ready.writes:
        return
    if context.model.answers_at_once:
        nbytes = _base_bytes(context.sources)
        yield _measured(context, BASE_ROUTED, base_routed(context, nbytes))
    else:
        notes.append("the base with our router is left out: the bundle's first pass is not the base's.")
    best = _best_static(statics)
    found = static_routed(context, best)
    given = next(row.given for row in statics if row.name == best)
    free = found.measure(context, given=False)
    yield MethodRow(f"{best}, routed", _ROUTED_STATIC, free, given, found.nbytes, found.milliseconds)


def mass_rows(context: StudyContext) -> Iterator[MethodRow]:
    """The lines of the bundle: as it answers, and with the task given."""
    size = Bundle(context.bundle, check=False).counted_bytes
    routed, known = mass_answers(context, lambda: context.model, {}, size)
    yield _measured(context, MASS, routed)
    yield _measured(context, TASK_GIVEN, known)


def _measured(
    context: StudyContext,
    name: str,
    found: Answered,
    kind: str | None = None,
    scale: float | None = None,
    chosen: bool = False,
) -> MethodRow:
    free = None if found.needs_task else found.measure(context, given=False)
    given = found.measure(context, given=True)
    fair = measure_tasks(context, found.tasks, standardised_choice(found.heads)) if found.heads else None
    return MethodRow(name, kind or _KINDS[name], free, given, found.nbytes, found.milliseconds, scale, chosen, fair)


def _base(sources: OpenedRecipe) -> OneBackbone:
    return OneBackbone(open_answering(sources), _base_bytes(sources))


def _base_bytes(sources: OpenedRecipe) -> int:
    base = sources.base
    return sum(base.info(name).nbytes for name in base.slots if name not in base.output)


def _peer_rows(context: StudyContext, sources: OpenedRecipe, notes: list[str]) -> Iterator[MethodRow]:
    """The routed peers; those that train something are left out where there are no inputs to train on."""
    try:
        inputs = context.support(_SUPPORT)
    except InputError as error:
        inputs = None
        notes.append(f"{' and '.join(_TRAINED)} are left out, which train on inputs: {error}")
    for name in peers(context):
        if inputs is None and name in _TRAINED:
            continue
        try:
            yield _measured(context, name, peer_answers(context, sources, name, inputs), "routed peer")
        except InputError as error:  # such as gates of MLPs, where adapters change none
            notes.append(f"{name} is left out: {error}")


def peers(context: StudyContext) -> list[str]:
    """The routed peers that are compared; a quick run takes the first, and those whose options are given."""
    settings = context.settings
    return [name for name in PEERS if not settings.quick or name in _QUICK_PEERS or settings.peer(name)]


def peer_answers(context: StudyContext, sources: OpenedRecipe, name: str, inputs: Inputs | None = None) -> Answered:
    """The answers of a routed peer; those that train nothing need no inputs."""
    options = {**(_TEXT_OPTIONS.get(name, {}) if context.ready.writes else {}), **context.settings.peer(name)}
    about = {"inputs": _SUPPORT, "seed": context.settings.seed, "recipe": context.recipe.dump(), "options": options}
    return answers_of(context, name, about, partial(PEERS[name], sources, inputs, **options))


def _experts(context: StudyContext, sources: OpenedRecipe) -> MethodRow:
    """Each task by its own expert: what every other line is divided by."""
    figures = summarize(context.references, context.ready.counts, context.references)
    return MethodRow(EXPERTS, _KINDS[EXPERTS], None, figures, expert_bytes(sources), None)


def expert_bytes(sources: OpenedRecipe) -> int:
    """Bytes of all experts: full ones as they are, adapters beside one base; heads apart."""
    base = _base_bytes(sources)
    full = [task for task in sources.plan.tasks if task.form == "full"]
    thin = 0
    for task in sources.plan.tasks:
        if task.form != "full":
            expert = sources.experts[task.name]
            for name in expert.names():
                slot, rank = sources.base.slots[name], expert.rank_limit(name)
                thin += (rank or 0) * sum(slot.matrix or (0,)) * sources.base.info(name).dtype.itemsize
    return len(full) * base + (base + thin if len(full) < len(sources.plan.tasks) else 0)


# What a reader sees

_WORDS = (
    "Accuracy is the mean over the tasks of each task's own metric; ± is the standard deviation over the tasks; normalised "
    "figures are divided by the experts'. Task unknown: an answer is right when task and label both are; a static merge "
    "takes the head with the largest logit, routed methods choose the head themselves. Standardised: the same with the "
    "logits of each head standardised over all rows, the fairest choice known without a router. `routed` after the name of "
    "the base or a merge: our router chooses the head, and what it compares inputs with counts in the size. Task given: the "
    "head is that of the true task, as papers evaluate static merges; routed methods still choose by themselves what is "
    "merged, but for the "
    "line `mass, task given`, which is given everything. Size is that of all tensors that answers need, heads apart, as a "
    "multiple of the base. Time is milliseconds of processor time per input, reading and heads included."
)


_TEXT_WORDS = (
    "Accuracy is the mean over the tasks of each task's own metric; ± is the standard deviation over the tasks; normalised "
    "figures are divided by the experts'. Answers are texts, which are right or wrong whatever task they were written for, "
    "so there is no head to be given: `task unknown` and `task given` are the same but for methods that keep a model for "
    "each task and the line `mass, task given`. Size is that of all tensors that answers need, as a multiple of the base, "
    "output layers apart on both sides. Time is milliseconds of processor time per input, reading included."
)


def _table(rows: list[MethodRow], base: int) -> Table:
    headers = [
        "method", "kind", "task unknown", "±", "normalised", "standardised", "task given", "±", "normalised",
        "size", "ms", "scale",
    ]  # fmt: skip
    lines = []
    for row in rows:
        scale = "-" if row.scale is None else f"{row.scale:g}{'' if row.chosen else ' (published)'}"
        time = "-" if row.milliseconds is None else f"{row.milliseconds:.1f}"
        size = f"{row.nbytes / base:.2f}"
        fair = percent(row.fair.mean) if row.fair else "-"
        lines.append([row.name, row.kind, *_figures(row.free), fair, *_figures(row.given), size, time, scale])
    return Table(headers, lines)


def _figures(found: Measured | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    deviation = "-" if found.deviation is None else f"{100 * found.deviation:.1f}"
    return [percent(found.mean), deviation, percent(found.normalised)]


def _task_tables(context: StudyContext, rows: list[MethodRow]) -> Iterator[Table | Text]:
    for words, given in (("Task unknown, each task:", False), ("Task given, each task:", True)):
        found = [(row.name, row.given if given else row.free) for row in rows]
        lines = [
            [name, *(percent(one.tasks[task]) for task in context.measured)] for name, one in found if one is not None
        ]
        yield Text(words)
        yield Table(["method", *context.measured], lines)


def _pictures(context: StudyContext, rows: list[MethodRow]) -> list[Picture]:
    free = {row.name: (row.free.mean, row.free.margin) for row in rows if row.free is not None}
    given = {row.name: (row.given.mean, row.given.margin) for row in rows if row.given is not None}
    best = _best_static(rows)
    series = {name: [one.tasks[task] for task in context.measured] for name, one in _drawn(rows, best).items()}
    return [
        Picture("methods-unknown", "Accuracy without the task's name, mean over the tasks.",
                plots.ranked_bars(_falling(free), MASS)),
        Picture("methods-given", "Accuracy with the task given, mean over the tasks.",
                plots.ranked_bars(_falling(given), TASK_GIVEN)),
        Picture("methods-tasks", f"Each task: its expert, MASS without the task's name, and {best} with it.",
                radar(context.measured, series)),
    ]  # fmt: skip


def _falling(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def _drawn(rows: list[MethodRow], best: str) -> dict[str, Measured]:
    by_name = {row.name: row for row in rows}
    found = {
        "experts": by_name[EXPERTS].given,
        "MASS, task unknown": by_name[MASS].free,
        f"{best}, task given": by_name[best].given,
    }
    return {name: one for name, one in found.items() if one is not None}


def _best_static(rows: list[MethodRow]) -> str:
    """The static merge of one model that does best with the task given."""
    return max(_statics(rows), key=lambda row: row.given.mean if row.given else 0.0).name


def _statics(rows: list[MethodRow]) -> list[MethodRow]:
    return [row for row in rows if row.kind == "static merge" and row.given is not None]


def _verdict(context: StudyContext, rows: list[MethodRow]) -> Verdict:
    """The method that answers best without the task."""
    found = {row.name: row.free for row in rows if row.free is not None}
    ours = found[MASS]
    best = max(found, key=lambda name: found[name].mean)
    theirs = found[best]
    why = ""
    if theirs.mean > ours.mean:
        lost = sorted(context.measured, key=lambda task: ours.tasks[task] - theirs.tasks[task])
        gaps = [f"{task} {100 * (theirs.tasks[task] - ours.tasks[task]):.1f}" for task in lost[:3]]
        given = next(row.given for row in rows if row.name == TASK_GIVEN)
        assert given is not None
        sizes = {row.name: row.nbytes for row in rows}
        why = (
            f"It is lost most on {', '.join(gaps)} points. With the task given, MASS has {percent(given.mean)}: "
            "what routing costs "
            f"is {100 * (given.mean - ours.mean):.1f} points. {best} takes {sizes[best] / sizes[MASS]:.1f} times its bytes."
        )
    margin = max(ours.margin, theirs.margin)
    return Verdict(
        "accuracy without the task's name, mean over the tasks", best, theirs.mean, MASS, ours.mean, margin, why
    )


def _sentences(rows: list[MethodRow], base: int, *, writes: bool) -> list[str]:
    by_name = {row.name: row for row in rows}
    best = by_name[_best_static(rows)]
    mass, given, experts = by_name[MASS].free, by_name[TASK_GIVEN].given, by_name[EXPERTS].given
    base_given = by_name[BASE].given
    assert (
        mass is not None
        and given is not None
        and experts is not None
        and best.given is not None
        and base_given is not None
    )
    found = [
        f"The best of {len(_statics(rows))} static merges of one model, {best.name}, has {percent(best.given.mean)} with "
        "the task given and "
        f"{percent(best.free.mean if best.free else None)} without; MASS has {percent(mass.mean)} without.",
        f"With the task given, MASS has {percent(given.mean)}; the experts themselves have {percent(experts.mean)} at "
        f"{by_name[EXPERTS].nbytes / base:.1f} times the base's bytes, MASS at {by_name[MASS].nbytes / base:.2f} times.",
    ]
    heads = "" if writes else " with the same heads"
    found.append(
        f"With the task given, the pretrained model has {percent(base_given.mean)}{heads}: all that updates can add there "
        f"is {100 * (experts.mean - base_given.mean):.1f} points."
    )
    found += _against_one_pass(by_name, best.name)
    routed = [row for row in rows if row.kind == "routed peer" and row.free is not None]
    if routed:
        top = max(routed, key=lambda row: row.free.mean if row.free else 0.0)
        best_of = f"The best of {len(routed)} routed peers" if len(routed) > 1 else "The routed peer"
        found.append(
            f"{best_of} without the task's name is {top.name}: {percent(top.free.mean if top.free else None)} "
            f"at {top.nbytes / base:.2f} times the base's bytes."
        )
    return found


def _against_one_pass(by_name: dict[str, MethodRow], best: str) -> Iterator[str]:
    """Whether MASS beats one model with the same heads and the same router, in words."""
    rows = [row for name in (BASE_ROUTED, f"{best}, routed") if (row := by_name.get(name)) is not None and row.free]
    mass = by_name[MASS].free
    if not rows or mass is None:
        return
    said = " and ".join(f"{row.name} {percent(row.free.mean if row.free else None)}" for row in rows)
    top = max(row.free.mean for row in rows if row.free)
    gain = (
        f"{100 * (mass.mean - top):.1f} points more" if mass.mean > top else "no more, so the second pass gains nothing"
    )
    yield f"One model with the same heads and the same router has, without the task's name: {said}. MASS has {gain}."


def _seconds(context: StudyContext) -> float:
    """Merges, a forward pass of every sample for each method, and the scales' candidates."""
    if context.settings.quick:
        return context.seconds_for(len(_QUICK_STATICS) + 2.5 * len(peers(context)) + 5) + 2 * context.merge_seconds
    methods = len(STATIC_METHODS) + len(KEEPING_METHODS)
    tried = 6 * SCALE_ROWS * len(context.measured) / len(context.samples)  # candidates of each scale
    forwards = methods + 2.5 * len(PEERS) + 5 + tried * len(STATIC_METHODS)
    return context.seconds_for(forwards) + methods * context.merge_seconds


METHODS = Study(
    "methods", "All methods on the same rows",
    "Which way to make one model of the experts serves best? The pretrained model with each head, the experts themselves, "
    "all static merges, the routed peers and MASS answer the same rows, without the task's name and with it.",
    run, _seconds, needs_recipe=True, here=TIMED, peers=tuple(PEERS),
    quick=("Some methods on the same rows",
           "A quick look at a few ways to make one model of the experts: the pretrained model with each head, the experts "
           f"themselves, the static merges {' and '.join(_QUICK_STATICS)}, the routed peer {_QUICK_PEERS[0]} and MASS "
           "answer the same rows, without the task's name and with it."),
)  # fmt: skip
