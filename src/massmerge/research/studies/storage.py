"""`storage`: what every routed method weighs, and what one answer costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.evaluation.from_recipe import open_answering
from massmerge.evaluation.report import Picture, Table, Text
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.model.inputs import Row
from massmerge.model.unrouted import OneBackbone
from massmerge.research.peers import PEERS, Peer
from massmerge.research.studies import plots
from massmerge.research.studies.compute import operations, time_ratios
from massmerge.research.studies.context import StudyContext
from massmerge.research.studies.methods import expert_bytes
from massmerge.research.studies.study import TIMED, Finding, Study, Verdict

MASS, BASE, EXPERTS = "mass", "base", "experts"
_SMALL = 4  # inputs that run at once while products are counted: so few stay in one thread
_COUNTED, _TIMED, _ROUNDS = 32, 16, 5
_QUICK_COUNTED, _QUICK_TIMED, _QUICK_ROUNDS = 4, 2, 1
_UNTRAINED: dict[str, dict[str, Any]] = {"wemoe": {"steps": 0}, "twin": {"epochs": 1}}


def run(context: StudyContext) -> Finding:
    """Weigh every routed method on disk, count its products and time it beside one forward pass."""
    sources = context.sources
    rows = [_plain_base(context, sources), _bundle(context)]
    times, notes = [], list(_NOTES)
    quick = context.settings.quick
    for name in PEERS:
        options = context.settings.peer(name)
        about = {"method": name, "recipe": context.recipe.dump(), "quick": quick, "options": options}
        try:
            found = context.cell("bytes and work", about, partial(_peer, context, sources, name))
        except InputError as error:  # such as gates of MLPs, where adapters change none
            notes.append(f"{name} is left out: {error}")
            continue
        rows.append(found["row"])
        times.append({"method": name, "forwards_timed": found["timed"]})
    mass = context.cell("bytes and work", {"method": MASS, "quick": quick}, lambda: _mass_compute(context))
    rows[1] |= {"forwards": mass["forwards"]}
    times.insert(0, {"method": MASS, "forwards_timed": mass["timed"]})
    rows.append(_copies(sources))
    base = rows[0]
    for row in rows:
        row |= {"of_the_base": round(row["bytes"] / base["bytes"], 4),
                "parameters_of_the_base": round(row["parameters"] / base["parameters"], 4)}  # fmt: skip
    return Finding(rows, _verdict(context, sources, rows), _sentences(rows, times), _parts(rows, times), times, notes)


# What is weighed


def _plain_base(context: StudyContext, sources: OpenedRecipe) -> dict[str, Any]:
    size = Bundle(context.bundle, check=False).base_bytes
    return {"method": BASE, "bytes": size, "parameters": _base_parameters(sources), "forwards": 1.0}


def _base_parameters(sources: OpenedRecipe) -> int:
    base = sources.base
    return sum(math.prod(base.info(name).shape) for name in base.slots if name not in base.output)


def _itemsize(sources: OpenedRecipe) -> int:
    """Bytes of a number of the base."""
    return sources.base.dtype.itemsize


def _bundle(context: StudyContext) -> dict[str, Any]:
    bundle = Bundle(context.bundle, check=False)
    base = sum(tensor.numel() for tensor in _distinct(context.model.core.base.state_dict().values()))
    factors = sum(math.prod(info.shape) for header in bundle.headers.values() for info in header.values())
    return {"method": MASS, "bytes": bundle.counted_bytes, "parameters": base + factors}


def _distinct(tensors: Any) -> list[Tensor]:
    """Tensors that are tied to each other once."""
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def _copies(sources: OpenedRecipe) -> dict[str, Any]:
    """A copy of the backbone for every task; adapters share one."""
    size = expert_bytes(sources)
    return {"method": EXPERTS, "bytes": size, "parameters": size // _itemsize(sources), "forwards": 1.0}


def _peer(context: StudyContext, sources: OpenedRecipe, name: str) -> dict[str, Any]:
    """A peer's row, and its time; what it would be trained to do changes neither."""
    peer = PEERS[name](sources, _few_inputs(context), **{**context.settings.peer(name), **_UNTRAINED.get(name, {})})
    with TemporaryDirectory(prefix="mass-") as folder:
        peer.save(Path(folder))
        size = (Path(folder) / "model.safetensors").stat().st_size
    row = {"method": name, "bytes": size, "parameters": sum(tensor.numel() for tensor in peer.tensors().values())}
    costs = _costs(context, lambda rows: _through_peer(context, peer, rows))
    return {"row": row | {"forwards": costs["forwards"]}, "timed": costs["timed"]}


def _few_inputs(context: StudyContext) -> dict[str, list[Any]]:
    """Two inputs of each task: a router has to be there, but its size and work do not depend on what it learned."""
    own = {task: [s for s in context.samples if s.task == task][:2] for task in context.measured}
    missing = {task: next(iter(own.values())) for task in context.tasks if task not in own}
    return {task: [context.input(s) for s in samples] for task, samples in {**own, **missing}.items()}


# What an answer costs


def _through_peer(context: StudyContext, peer: Peer, rows: list[Row]) -> object:
    return _first_words(peer, rows) if peer.writes else peer.forward(context.model.core.batch(rows))


def _mass_compute(context: StudyContext) -> dict[str, Any]:
    model = context.model
    if model.writes:
        return _costs(context, lambda rows: _first_words(model, rows))
    return _costs(context, lambda rows: model.embed(rows, batch_size=len(rows)))


def _first_words(model: Any, rows: list[Row]) -> object:
    """The first token of each text: what a model that writes does for every token, and reading the prompt."""
    return model.generate(rows, batch_size=len(rows), max_new_tokens=1)


def _costs(context: StudyContext, answer: Callable[[list[Row]], object]) -> dict[str, Any]:
    """Products and processor time of answers to some inputs of all tasks, as multiples of the base's forward pass."""
    writer = OneBackbone(open_answering(context.sources), 0) if context.ready.writes else None

    @torch.inference_mode()
    def forward(rows: list[Row]) -> object:
        """What a plain forward of the base gives."""
        if writer is not None:
            return _first_words(writer, rows)
        core = context.model.core
        return core.base(**core.call(core.batch(rows)))

    quick = context.settings.quick
    count, fewer, rounds = (_QUICK_COUNTED, _QUICK_TIMED, _QUICK_ROUNDS) if quick else (_COUNTED, _TIMED, _ROUNDS)
    step = max(1, len(context.samples) // count)
    rows = [context.row(sample) for sample in context.samples[::step][:count]]
    batches = [rows[at : at + _SMALL] for at in range(0, len(rows), _SMALL)]
    counted = [sum(_lasting_operations(partial(go, batch)) for batch in batches) for go in (answer, forward)]
    timed = rows[:: max(1, len(rows) // fewer)][:fewer]
    ratios = time_ratios({"answer": lambda: answer(timed), BASE: lambda: forward(timed)}, BASE, rounds)
    return {"forwards": round(counted[0] / counted[1], 4), "timed": round(ratios["answer"], 2)}


def _lasting_operations(run: Callable[[], object]) -> int:
    """Products of a call that has been made before: cores of sets and routers are made once, whichever call is the first."""
    run()
    return operations(run)


# What a reader sees

_WORDS = (
    "Bytes are those of a folder on disk, heads apart; parameters are the numbers in it; both as multiples of the base. "
    "Products: multiplications and additions of all matrix products of one answer up to the heads, counted, as multiples "
    "of one forward pass of the base. Time: processor time of the same, measured in turns with the base's forward pass, "
    "the median of some rounds; it differs from run to run. An answer of a model that writes is its first token."
)
_NOTES = (
    "the gates of wemoe and the router of twin are there but not trained: neither size nor work depends on it.",
    "experts: a copy of the backbone for each task (adapters share one), whose task must be given.",
)


def _parts(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[Any]:
    timed = {one["method"]: f"{one['forwards_timed']:.2f}" for one in times}
    lines = [
        [row["method"], f"{row['bytes'] / 1e6:.1f} MB", f"{row['of_the_base']:.2f}",
         f"{row['parameters_of_the_base']:.2f}", f"{row['forwards']:.2f}", timed.get(row["method"], "-")]
        for row in rows
    ]  # fmt: skip
    headers = [
        "method",
        "bytes",
        "times the base",
        "parameters, times the base",
        "products, forwards",
        "time, forwards",
    ]
    drawn = {row["method"]: row["of_the_base"] for row in rows}
    caption = "Bytes as multiples of the base, heads apart."
    return [Table(headers, lines), Text(_WORDS), Picture("storage", caption, plots.multiples(drawn, MASS))]


def _verdict(context: StudyContext, sources: OpenedRecipe, rows: list[dict[str, Any]]) -> Verdict:
    """The method with the fewest bytes, as a share of those that a copy of every expert takes."""
    by_name = {row["method"]: row for row in rows}
    whole = by_name[EXPERTS]["bytes"]
    saved = {name: 1 - row["bytes"] / whole for name, row in by_name.items() if name not in (BASE, EXPERTS)}
    best = max(saved, key=lambda name: saved[name])
    why = ""
    if saved[best] > saved[MASS]:
        linear = {name for name, slot in sources.base.slots.items() if slot.kind in ("linear", "conv1d")}
        kept = Bundle(context.bundle, check=False).headers
        others = sum(
            info.nbytes for header in kept.values() for n, info in header.items() if not _is_of(n, linear)
        )  # fmt: skip
        own = by_name[MASS]["bytes"] - by_name[BASE]["bytes"]
        why = (
            f"A bundle fills its budget ({context.recipe.merge.budget or 'given as a rank'}); a smaller one is a smaller "
            f"bundle. Of what MASS keeps beside the base, {100 * others / own:.0f} % are embeddings, norms and biases."
        )
    return Verdict("bytes saved against a copy of every expert", best, saved[best], MASS, saved[MASS], 0.0, why)


def _is_of(name: str, matrices: set[str]) -> bool:
    """Whether a stored tensor is one of a linear layer's factors."""
    return name.rpartition(".")[0] in matrices


def _sentences(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> list[str]:
    by_name, timed = {row["method"]: row for row in rows}, {one["method"]: one["forwards_timed"] for one in times}
    peers = [name for name in by_name if name not in (MASS, BASE, EXPERTS)]
    quick = min([MASS, *peers], key=lambda name: by_name[name]["forwards"])
    return [
        f"MASS takes {by_name[MASS]['of_the_base']:.2f} times the base's bytes for what {EXPERTS} take "
        f"{by_name[EXPERTS]['of_the_base']:.0f} times for; the peers take "
        + ", ".join(f"{name} {by_name[name]['of_the_base']:.2f}" for name in peers)
        + ".",
        f"The fewest products per answer: {quick}, {by_name[quick]['forwards']:.2f} forward passes; MASS needs "
        f"{by_name[MASS]['forwards']:.2f}, in {timed[MASS]:.2f} times the processor time of one.",
    ]


STORAGE = Study(
    "storage", "Bytes and work of routed methods",
    "What does it cost to keep many experts in one model that routes? Bytes on disk and parameters relative to the base, "
    "and the work of an answer in forward passes of the base, for MASS and every routed peer.",
    run, lambda context: 45.0 + _COUNTED * 12 * context.forward_seconds * len(PEERS), needs_recipe=True, here=TIMED,
    peers=tuple(PEERS),
)  # fmt: skip
