"""Answers to many rows by an engine: each worker has a model of its own and answers a range of rows at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

import massmerge
from massmerge.bundle.manifest import read_manifest
from massmerge.engines.job import Engine, EngineJob
from massmerge.engines.unit import Unit
from massmerge.errors import InputError, MassError
from massmerge.io.durable import sync_folder
from massmerge.io.row_files import SUFFIX, read_answers, read_inputs, write_answers, write_inputs
from massmerge.io.sealed import SealedFiles, key_of
from massmerge.model.answers import Answer, Generation, Prediction, Routing
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.model.speed import fast_at_once
from massmerge.model.static import StaticModel
from massmerge.recipe import AnswerOptions

_ROWS = 1024
"""About so many rows are a unit; a multiple of the batch, so that batches are those of one process."""
_PLACEMENT = ("device", "dtype")
_SECONDS, _MEMORY = 0.05, 4  # per row; bytes of memory per byte of the bundle
_A = TypeVar("_A", Prediction, Generation)
_Call = Literal["stream", "generate_many", "answer_sets", "write_sets"]


@dataclass(frozen=True)
class AnswerRows:
    """A range of rows: their file, what is asked of the model, and the key of the file of answers."""

    rows: str
    key: str
    call: _Call
    options: dict[str, Any]


@dataclass(frozen=True)
class RowJob(EngineJob):
    """The description of what answers."""

    bundle: Path
    sha256: str
    """Of the bundle's manifest."""
    loading: dict[str, Any]
    """Options of `load`."""
    folder: Path
    static: bool = False

    @property
    def store(self) -> Path:
        """The folder of rows and answers."""
        return self.folder

    @property
    def name(self) -> str:
        """What it is."""
        return f"answers of {self.bundle}"

    @property
    def shared(self) -> bool:
        """A model each."""
        return False

    @property
    def mark(self) -> str:
        """What answers depend on besides rows and options."""
        return json.dumps([massmerge.__version__, self.sha256, self.loading])

    def open(self) -> RowWorker:
        """Load the bundle."""
        if read_manifest(self.bundle)["sha256"] != self.sha256:
            raise InputError(f"{self.bundle}: is another bundle than when the command began. Run it again.")
        with fast_at_once():
            if self.static:
                model: Model | StaticModel = StaticModel(self.bundle, **{n: self.loading[n] for n in _PLACEMENT})
            else:
                model = load(self.bundle, check=True, **self.loading)
        return RowWorker(model, self)


class RowWorker:
    """A model with the files that it reads and writes."""

    def __init__(self, model: Model | StaticModel, job: RowJob) -> None:
        self._model, self._job = model, job

    def carry_out(self, unit: Unit, before: Mapping[str, Any]) -> str:
        """Answer a range of rows; returns the name of the file of answers."""
        data: AnswerRows = unit.data
        files = answer_files(self._job, data)
        draft = files.draft()
        try:
            given = self._answers(data, read_inputs(self._job.store / data.rows))
            write_answers(draft, (answer.to_dict() for answer in given))
            return files.seal(draft, data.key, SUFFIX)
        finally:
            draft.unlink(missing_ok=True)

    def _answers(self, data: AnswerRows, rows: Iterator[Any]) -> Iterator[Prediction] | Iterator[Generation]:
        if data.call in ("answer_sets", "write_sets"):
            assert isinstance(self._model, Model), "a static merge has no sets"
            return _by_sets(self._model, data.call, list(rows), **data.options)
        call: Callable[..., Iterator[Any]] = getattr(self._model, data.call)
        return call(rows, on_error="row", **data.options)


def _by_sets(
    model: Model, call: str, rows: list[Any], *, answer: dict[str, Any], batch_size: int, **options: Any
) -> Iterator[Any]:
    """Answers to rows of which each is followed by its set, with the answer options of who asks."""
    chosen = AnswerOptions(**answer)
    core = replace(model.core, options=chosen)
    asked = Model(core, model.stages, model.sets.merged_by(chosen.merge))
    inputs, sets = rows[::2], [Routing({}, weights, selected, "") for selected, weights in map(json.loads, rows[1::2])]
    for at in range(0, len(inputs), batch_size):  # the batches of one process
        part = slice(at, at + batch_size)
        run = asked.answer if call == "answer_sets" else asked.write
        yield from run(inputs[part], sets[part], batch_size=batch_size, **options)


def answer_files(job: RowJob, data: AnswerRows) -> SealedFiles:
    """The files of answers to some rows with some options."""
    return SealedFiles(job.store, json.dumps([job.mark, data.rows, data.call, data.options], default=str))


@dataclass
class EngineModel:
    """Answers as a model does, by the workers of an engine. Use it within `opened`, which keeps what is finished."""

    job: RowJob
    engine: Engine
    seen: Callable[[int], object] = lambda count: None
    """Is told how many rows more are answered."""
    _calls: int = field(default=0, init=False)

    @classmethod
    @contextmanager
    def opened(
        cls,
        bundle: str | Path,
        engine: Engine,
        folder: Path,
        *,
        loading: Mapping[str, Any] | None = None,
        static: bool = False,
        seen: Callable[[int], object] = lambda count: None,
    ) -> Iterator[EngineModel]:
        """Hold a work folder that every worker sees; it goes when all went well, and is used again when not.

        Args:
            bundle: the bundle, or a static merge.
            engine: where the work runs.
            folder: the work folder.
            loading: options of `load`.
            static: whether it is a static merge.
            seen: is told how many rows more are answered.

        Raises:
            MassError: another command holds the folder.
        """
        path = Path(bundle).resolve()
        job = RowJob(path, read_manifest(path)["sha256"], dict(loading or {}), folder.resolve(), static)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise MassError(f"{folder}: another command is working there. Wait for it to finish.") from None
        try:
            for path in folder.iterdir():  # drafts and claims of a run that was interrupted
                if key_of(path) is None and path.name != "lock":
                    path.unlink()
            yield cls(job, engine, seen)
        finally:
            lock.release()
        shutil.rmtree(folder)
        sync_folder(folder.parent)

    def stream(self, items: Iterable[Any], **options: Any) -> Iterator[Prediction]:
        """As `Model.stream`, with errors as rows."""
        return self._answers("stream", _prediction, items, options)

    def generate_many(self, items: Iterable[Any], **options: Any) -> Iterator[Generation]:
        """As `Model.generate_many`, with errors as rows."""
        return self._answers("generate_many", _generation, items, options)

    def answer_sets(
        self, items: Iterable[tuple[Any, Routing]], *, answer: AnswerOptions, **options: Any
    ) -> Iterator[Prediction]:
        """As `Model.answer` of a bundle with other answer options, for inputs with the sets that were selected for them."""
        return self._answers("answer_sets", _prediction, _paired(items), {"answer": answer.model_dump(), **options}, 2)

    def write_sets(
        self, items: Iterable[tuple[Any, Routing]], *, answer: AnswerOptions, **options: Any
    ) -> Iterator[Generation]:
        """As `Model.write`, in the same way."""
        return self._answers("write_sets", _generation, _paired(items), {"answer": answer.model_dump(), **options}, 2)

    def _answers(
        self,
        call: _Call,
        rebuilt: Callable[[dict[str, Any]], _A],
        items: Iterable[Any],
        options: dict[str, Any],
        parts: int = 1,
    ) -> Iterator[_A]:
        """Cut the rows into files, let them be answered, and read the answers in order: memory holds a range at a time.

        Args:
            call: what is asked of the model.
            rebuilt: makes an answer of plain data.
            items: the rows, each of so many `parts`.
            options: of the call.
            parts: how many items are a row.
        """
        options = {name: value for name, value in options.items() if name != "on_error"}
        self._calls += 1
        names: dict[str, str] = {}
        todo = []
        for number, (rows, count) in enumerate(self._spooled(items, int(options.get("batch_size", 32)), parts)):
            key = f"answers{self._calls}.{number:06d}"
            data = AnswerRows(rows, key, call, options)
            found = answer_files(self.job, data).find(key, SUFFIX)
            names[key] = found or ""
            if found is None:
                memory = _MEMORY * sum(path.stat().st_size for path in self.job.bundle.rglob("*.safetensors"))
                where = f"rows {number * _ROWS + 1:,} to {number * _ROWS + count:,}"
                todo.append(Unit(where, memory, count * _SECONDS, data=data))
            else:
                self.seen(count)
        counts = {unit.key: round(unit.seconds / _SECONDS) for unit in todo}

        def done(unit: Unit, name: str) -> None:
            """Note a part's file, and its rows as answered."""
            names[unit.data.key] = name
            self.seen(counts[unit.key])

        self.engine.run(self.job, todo, done)
        for name in names.values():
            yield from map(rebuilt, read_answers(self.job.store / name))

    def _spooled(self, items: Iterable[Any], batch: int, parts: int) -> Iterator[tuple[str, int]]:
        """The rows in files, whose names tell their content; the name and the number of rows of each."""
        files, source = SealedFiles(self.job.store, "rows"), iter(items)
        size = batch * max(1, _ROWS // batch) * parts
        for number in range(1 << 40):
            rows = list(islice(source, size))
            if not rows:
                return
            draft = files.draft()
            write_inputs(draft, rows)
            yield files.seal(draft, f"rows{self._calls}.{number:06d}", SUFFIX), len(rows) // parts


def is_worth_it(count: int) -> bool:
    """Whether so many rows are more than a unit: for fewer no worker should load a bundle."""
    return count > _ROWS


def _paired(items: Iterable[tuple[Any, Routing]]) -> Iterator[Any]:
    """Each input and then, as text, what an answer by its set depends on."""
    for item, routing in items:
        yield item
        yield json.dumps([routing.selected, routing.weights])


def _routed(data: dict[str, Any]) -> dict[str, Any]:
    routing = data["routing"]
    return data | {"routing": None if routing is None else Routing(**routing)}


def _prediction(data: dict[str, Any]) -> Prediction:
    return Prediction(**_routed(data) | {"alternatives": [Answer(**one) for one in data["alternatives"]]})


def _generation(data: dict[str, Any]) -> Generation:
    return Generation(**_routed(data))
