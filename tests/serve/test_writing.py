"""The thread that writes, with a decoder that takes a step when it is told to."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from massmerge.errors import DamageError, InputError
from massmerge.model.answers import Routing
from massmerge.model.decode import Piece
from massmerge.routing.sessions import Sessions
from massmerge.serve.errors import ServiceError
from massmerge.serve.texts import Ask
from massmerge.serve.writing import TextWriter


class FakeDecoder:
    """Writes the letters of a prompt's own text, one a step; a step is taken when a permit is there."""

    def __init__(self, permits: threading.Semaphore) -> None:
        self.permits, self.left, self.finished, self.fails = permits, {}, [], None
        self.number = 0

    def prompt(self, prompt, routing, *, seed, logprobs, **options):
        if options["max_new_tokens"] > 50:
            raise InputError("too many.")
        return list("abcdefgh"[: options["max_new_tokens"]])

    def admit(self, prompts):
        for prompt in prompts:
            self.left[self.number] = prompt
            self.number += 1
        return [self.number - 1]

    def finish(self, number):
        self.finished.append(number)
        self.left.pop(number, None)

    def step(self):
        assert self.permits.acquire(timeout=20)
        if self.fails:
            raise self.fails
        found = []
        for number, letters in list(self.left.items()):
            text = letters.pop(0)
            found.append(Piece(number, 5, text, end=None if letters else "stop"))
            if not letters:
                del self.left[number]
        return found


class FakeWriter:
    """A model that writes with such a decoder."""

    def __init__(self) -> None:
        self.permits, self.made = threading.Semaphore(0), []
        config = SimpleNamespace(max_position_embeddings=100, model_type="llama")
        self.core = SimpleNamespace(base=SimpleNamespace(config=config))

    def decoder(self):
        self.made.append(FakeDecoder(self.permits))
        return self.made[-1]

    def read(self, prompt):
        if prompt == "bad":
            raise InputError("cannot be read.")
        return {"input_ids": torch.ones(3, dtype=torch.long)}

    def route(self, rows, *, batch_size):
        return [Routing({"a": 0.0}, {"a": 1.0}, ["a"], "M0", probabilities={"a": 0.8}) for _ in rows]


def run(test, **options):
    """Run a test in a loop, with a writer that is closed in the end."""

    async def all_of_it():
        model, died = FakeWriter(), []
        models = [model]
        given = {"size": 4, "limit": 2, "sessions": Sessions(), "died": died.append, **options}
        writer = TextWriter(lambda: models[-1], **given)
        try:
            await asyncio.wait_for(test(writer, models, died), 30)
        finally:
            for one in models:
                one.permits.release(1000)
            await asyncio.to_thread(writer.close, 10)

    asyncio.run(all_of_it())


async def text(job) -> str:
    found = []
    while not found or found[-1].end is None:
        found.append(await job.next())
    return "".join(one.text for one in found)


def test_a_prompt_joins_texts_that_have_begun_and_ends_before_them():
    async def test(writer, models, died):
        long = writer.submit(Ask("x", most=8))
        assert (await long.next()).routing.confidence == 0.8
        models[0].permits.release(2)
        assert [(await long.next()).text for _ in range(2)] == ["a", "b"]
        short = writer.submit(Ask("y", task="a", most=2))  # joins at the third or fourth step
        models[0].permits.release(4)
        assert (await short.next()).routing.selected == ["a"] and await text(short) == "ab"
        assert long.heard.qsize() < 6  # it is not at its end
        models[0].permits.release(10)
        assert await text(long) == "cdefgh"

    run(test)


def test_the_queue_is_bounded_and_a_text_that_nobody_reads_makes_room():
    async def test(writer, models, died):
        first = writer.submit(Ask("x", most=8))
        await first.next()
        waiting = [writer.submit(Ask("x", most=1)) for _ in range(2)]
        with pytest.raises(ServiceError, match="2 prompts are waiting") as refused:
            writer.submit(Ask("x"))
        assert refused.value.status == 503 and refused.value.retry_after
        writer.cancel(waiting[0])
        assert writer.waiting == 1
        writer.cancel(first)
        models[0].permits.release(3)  # the step under way, and those of the one that waited
        await waiting[1].next()
        assert await text(waiting[1]) == "a" and models[0].made[0].finished == [0]

    run(test, size=1)


def test_a_prompt_that_cannot_be_answered_fails_alone():
    async def test(writer, models, died):
        models[0].permits.release(100)
        jobs = [writer.submit(ask) for ask in (Ask("bad"), Ask("x", most=60))]
        for job, words in zip(jobs, ("cannot be read", "too many"), strict=True):
            with pytest.raises(ServiceError, match=words) as error:
                await job.next()
            assert error.value.status == 400
        good = writer.submit(Ask("x", most=3))
        await good.next()
        assert await text(good) == "abc"

    run(test)


def test_a_step_that_fails_ends_its_texts_and_others_are_written_after_it():
    async def test(writer, models, died):
        job = writer.submit(Ask("x", most=3))
        await job.next()
        models[0].made[0].fails = RuntimeError("a library's own words")
        models[0].permits.release(10)
        with pytest.raises(ServiceError) as error:
            await text(job)
        assert error.value.status == 500 and "library" not in error.value.message
        other = writer.submit(Ask("x", most=3))
        await other.next()
        assert await text(other) == "abc" and len(models[0].made) == 2

    run(test)


def test_a_damaged_bundle_ends_the_thread_and_is_told():
    async def test(writer, models, died):
        job = writer.submit(Ask("x", most=3))
        await job.next()
        models[0].made[0].fails = DamageError("a file has changed")
        models[0].permits.release(10)
        while not died:
            await asyncio.sleep(0.005)
        with pytest.raises(ServiceError, match="stopping"):
            writer.submit(Ask("x"))

    run(test)


def test_texts_that_have_begun_are_finished_by_the_model_that_began_them():
    async def test(writer, models, died):
        old = writer.submit(Ask("x", most=8))
        await old.next()
        models.append(FakeWriter())
        new = writer.submit(Ask("x", most=2))
        for model in models:
            model.permits.release(100)
        await new.next()
        assert await text(new) == "ab" and await text(old) == "abcdefgh"
        assert len(models[0].made) == len(models[1].made) == 1

    run(test)
