"""Writes for many prompts at once, a token a step; prompts join and leave between steps.

The base's product runs once for all rows, whatever sets they have; each segment of rows adds the update of its set. Rows
stand sorted by set, and all end at the same column of the key-value cache, with padding before the shorter ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from massmerge.errors import InputError
from massmerge.model.answers import Routing
from massmerge.model.core import Core
from massmerge.model.decode.caches import columns, join, keep
from massmerge.model.decode.pieces import GrowingText, Piece
from massmerge.model.decode.prompt import Prompt, prepare, steps_alone
from massmerge.model.prompts import NOT_FINITE, Writing
from massmerge.model.second_pass.segments import Segment, Segments, running
from massmerge.model.second_pass.sets import Sets
from massmerge.model.speed.lengths import grouped


@dataclass
class _Row:
    """A prompt that is written for."""

    id: int
    prompt: Prompt
    ids: Tensor
    """(1, tokens): the prompt and what was written."""
    text: GrowingText | None
    random: torch.Generator | None

    @property
    def order(self) -> tuple[Any, ...]:
        """Rows of one set stand together."""
        return (*self.prompt.changes.tasks, id(self.prompt.changes))


class StepDecoder:
    """Writes for prompts of several selected sets as one batch. `Model.decoder` makes one; one thread at a time uses it.

        decoder = model.decoder()
        ids = decoder.admit([decoder.prompt("win a prize", routing, max_new_tokens=20)])
        while decoder.running:
            for piece in decoder.step():       # one new token for each prompt
                print(piece.id, piece.text, piece.end)

    `admit` may be called between any two steps: new prompts are read at the next step, in which all others go on.
    A prompt whose last piece has been given (`end`) leaves by itself; `finish` takes one out earlier. `prompt` may be
    called in other threads.

    Args:
        core: the base and what reads prompts.
        sets: the sets that prompts are routed to.

    Raises:
        InputError: the base is no decoder, or has a part that cannot be divided by prompts.
    """

    def __init__(self, core: Core, sets: Sets) -> None:
        self._core, self._sets = core, sets
        model = sets.language_models.mixed
        if model is None:
            raise InputError(f"a {type(core.base).__name__} writes for one selected set at a time. Use `generate`.")
        self._model: PreTrainedModel = model
        takes = signature(model.forward).parameters
        self._positions = "position_ids" in takes
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._numbers = itertools.count()
        self._waiting: list[_Row] = []
        self._rows: list[_Row] = []
        self._cache = DynamicCache()

    # Prompts

    def prompt(
        self, prompt: Any, routing: Routing, *, seed: int | None = None, logprobs: int | None = None, **options: Any
    ) -> Prompt:
        """A prompt that is ready to be admitted.

        Args:
            prompt: a text, or what else `generate` takes.
            routing: its selected set, as `Model.route` finds it.
            seed: of its random generator, with `do_sample`; the text depends on no other prompt's.
            logprobs: log-probabilities for its pieces: 0 for those of the tokens written, n for the n most probable too.
            options: those of transformers' `generate` for one text; objects (`logits_processor`) must be its own.

        Raises:
            InputError: the prompt cannot be read, no set was selected, or the options are not for writing step by step.
        """
        writing = Writing(self._core.reader, self._core.base.config, self._sets.language_models.defaults, options)
        if not steps_alone(writing):
            raise InputError("beam search and other ways that need several rows cannot be written step by step.")
        return self.prepared(writing, writing.read(prompt), routing, seed=seed, logprobs=logprobs)

    def prepared(
        self, writing: Writing, row: dict[str, Tensor], routing: Routing, *, seed: int | None, logprobs: int | None
    ) -> Prompt:
        """The same of a prompt and options that have been read."""
        groups = self._sets.groups([routing])
        if not groups:
            raise InputError("no task was selected for this prompt, so there is nothing to write.")
        return prepare(self._model, writing, row, routing, groups[0][0], seed=seed, logprobs=logprobs)

    # Steps

    def admit(self, prompts: Sequence[Prompt]) -> list[int]:
        """Let prompts join at the next step; their numbers."""
        self._sets.cache.use(list({id(p.changes): p.changes for p in prompts}.values()))
        rows = [self._row(prompt) for prompt in prompts]
        self._waiting += rows
        return [row.id for row in rows]

    @property
    def running(self) -> list[int]:
        """Numbers of the prompts whose texts are not at their end, those that wait included."""
        return [row.id for row in (*self._rows, *self._waiting)]

    def finish(self, number: int) -> None:
        """Take a prompt out, wherever its text is; nothing where it has ended already."""
        self._waiting = [row for row in self._waiting if row.id != number]
        self._keep([row for row in self._rows if row.id != number])

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """One more token for each prompt, by their numbers; the first one for those that have just joined."""
        self._core.refuse_damage()
        logits = [self._go_on()] if self._rows else []
        if self._waiting:
            logits.append(self._join())
        if not logits:
            return []
        scores = torch.cat(logits)
        pieces = self._pieces(scores)
        order = sorted(range(len(self._rows)), key=lambda i: self._rows[i].order)
        self._keep([self._rows[i] for i in order if pieces[i].end is None])
        self._core.refuse_damage()  # what was computed while a file changed is no answer
        return sorted(pieces, key=lambda piece: piece.id)

    def _row(self, prompt: Prompt) -> _Row:
        reader = self._core.reader
        text = GrowingText(reader.text, prompt.stops) if reader.has_processor else None
        random = None
        if prompt.sample:
            random = torch.Generator(self._model.device)
            random.manual_seed(int(torch.randint(2**62, ())) if prompt.seed is None else prompt.seed)
        return _Row(next(self._numbers), prompt, prompt.ids, text, random)

    def _go_on(self) -> Tensor:
        """Scores (rows, vocabulary) of the next token of the rows that run; the cache lacks but the last token of each."""
        ids = torch.cat([row.ids[:, -1:] for row in self._rows])
        return self._forward(self._rows, ids, self._cache)

    def _join(self) -> Tensor:
        """The same of the rows that wait, which run from now on; they are read in groups of similar length."""
        groups = grouped([row.ids.shape[1] for row in self._waiting], self._model.device)
        parts = [[self._waiting[i] for i in own] for own in groups]
        logits = [self._read(sorted(rows, key=lambda row: row.order)) for rows in parts]
        self._waiting = []
        return torch.cat(logits)

    def _read(self, rows: list[_Row]) -> Tensor:
        """The same of some rows, which join those that run."""
        longest = max(row.ids.shape[1] for row in rows)
        padded = [torch.nn.functional.pad(row.ids, (longest - row.ids.shape[1], 0)) for row in rows]
        cache = DynamicCache()
        logits = self._forward(rows, torch.cat(padded), cache)
        self._cache = join(self._cache, cache) if self._rows else cache
        self._rows = self._rows + rows
        return logits

    def _forward(self, rows: list[_Row], ids: Tensor, cache: DynamicCache) -> Tensor:
        """Scores of the token after `ids (rows, new)`, which come behind those in the cache."""
        lengths = torch.tensor([row.ids.shape[1] for row in rows], device=ids.device)
        total = columns(cache) + ids.shape[1]
        places = torch.arange(total, device=ids.device) - (total - lengths)[:, None]  # below 0: padding
        given: dict[str, Any] = dict(self._last_only)
        if int(lengths.min()) < total:
            given["attention_mask"] = (places >= 0).long()
        if self._positions:
            given["position_ids"] = places[:, -ids.shape[1] :].clamp_min(0)
        with running(_segments(rows)):
            output = self._model(input_ids=ids, past_key_values=cache, use_cache=True, **given)
        scores: Tensor = output.logits[:, -1].float()
        return scores

    def _keep(self, rows: list[_Row]) -> None:
        """Leave these rows of those that run, in this order, and no column that is padding for all."""
        places = {id(row): i for i, row in enumerate(self._rows)}
        if rows:
            # The last token of a row comes into the cache with the next step.
            keep(self._cache, [places[id(row)] for row in rows], max(row.ids.shape[1] for row in rows) - 1)
        else:
            self._cache = DynamicCache()
        self._rows = rows

    # Tokens

    def _pieces(self, scores: Tensor) -> list[Piece]:
        """The next token of every row, appended to it."""
        best = scores.argmax(-1).tolist()
        finite = (scores < torch.inf).all(-1).tolist()
        found = []
        for i, row in enumerate(self._rows):
            own = scores[i : i + 1]
            token: int | None = best[i] if finite[i] else None
            if finite[i] and (row.random or row.prompt.processors):
                token = _chosen(row, own)
            if token is None:
                found.append(Piece(row.id, None, end="error", error=NOT_FINITE))
            else:
                found.append(self._piece(row, own, token))
        return found

    def _piece(self, row: _Row, scores: Tensor, token: int) -> Piece:
        row.ids = torch.cat([row.ids, row.ids.new_tensor([[token]])], 1)
        end = row.prompt.end(row.ids)
        text = "" if row.text is None else row.text.add(token, last=end is not None)
        logprob, top = None, {}
        if row.prompt.logprobs is not None:
            all_of_them = scores[0].log_softmax(-1)
            logprob = float(all_of_them[token])
            values, tokens = all_of_them.topk(row.prompt.logprobs)
            top = dict(zip(tokens.tolist(), values.tolist(), strict=True))
        return Piece(row.id, token, text, logprob, top, end)


def _segments(rows: list[_Row]) -> Segments:
    """Rows sorted by set as the segments of a batch."""
    parts = []
    for _, group in itertools.groupby(range(len(rows)), key=lambda i: rows[i].order):
        members = list(group)
        parts.append(Segment(rows[members[0]].prompt.changes, members[0], members[-1] + 1))
    return Segments(tuple(parts), len(rows))


def _chosen(row: _Row, scores: Tensor) -> int | None:
    """The next token as the row's options have it, from raw scores (1, vocabulary); none where they leave no numbers."""
    processed = row.prompt.processors(row.ids, scores.clone())
    if row.random is None:
        return int(processed.argmax(-1))
    shares = processed.softmax(-1)
    # Such as a temperature so low that scores become infinite: the fault of this prompt, and not of the others.
    return int(torch.multinomial(shares, 1, generator=row.random)) if bool(shares.isfinite().all()) else None
