"""The queue and the thread that empties it, with a function in the model's place."""

import asyncio
import threading

import pytest

from massmerge.io.background import end_background
from massmerge.model.answers import Prediction
from massmerge.serve.batching import Batcher, BatchKey, Fault
from massmerge.serve.errors import ServiceError
from massmerge.serve.worker import SentText, Worker
from serving import FakeModel


class Recorder:
    """Notes what runs together; waits at its gate."""

    def __init__(self) -> None:
        self.batches, self.gate, self.begun = [], threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, items, choice, top):
        self.batches.append((list(items), choice, top))
        self.begun.set()
        assert self.gate.wait(10)
        return [Prediction(f"task of {item}") for item in items]


def run(scenario, size=4, wait=0.0, limit=8, function=None):
    """A scenario with a batcher and its recorder, in an event loop."""
    recorder = Recorder() if function is None else function

    async def main():
        batcher = Batcher(recorder, size=size, wait=wait, limit=limit)
        try:
            await asyncio.wait_for(scenario(batcher, recorder), 10)
        finally:
            if isinstance(recorder, Recorder):
                recorder.gate.set()
            await asyncio.to_thread(batcher.close)

    asyncio.run(main())
    return recorder


async def held(batcher, recorder):
    """A job that runs and does not end before the gate is opened."""
    recorder.gate.clear()
    job = batcher.submit(["first"], BatchKey(), 1)
    await asyncio.to_thread(recorder.begun.wait, 10)
    return job


def tasks(outcomes):
    return [outcome.result.task for outcome in outcomes]


def test_requests_that_arrive_within_the_wait_run_as_one_batch():
    async def scenario(batcher, recorder):
        jobs = []
        for name in "abc":
            jobs.append(batcher.submit([name], BatchKey(), 1))
            await asyncio.sleep(0.01)
        assert [tasks(await job.done) for job in jobs] == [["task of a"], ["task of b"], ["task of c"]]

    assert [batch[0] for batch in run(scenario, wait=0.5).batches] == [["a", "b", "c"]]


def test_a_full_batch_does_not_wait():
    async def scenario(batcher, recorder):
        await batcher.submit(list("abcd"), BatchKey(), 1).done

    assert [batch[0] for batch in run(scenario, wait=30.0).batches] == [list("abcd")]


def test_many_inputs_run_in_batches_of_the_size_and_are_answered_in_order():
    async def scenario(batcher, recorder):
        first = await held(batcher, recorder)
        job = batcher.submit(list("abcdef"), BatchKey(), 1)
        recorder.gate.set()
        await first.done
        assert tasks(await job.done) == [f"task of {name}" for name in "abcdef"]

    assert [len(batch[0]) for batch in run(scenario).batches] == [1, 4, 2]


def test_inputs_with_other_tasks_to_choose_from_run_apart_and_the_largest_top_counts():
    async def scenario(batcher, recorder):
        await held(batcher, recorder)
        jobs = [
            batcher.submit([name], BatchKey(tasks), top)
            for name, tasks, top in (("a", None, 1), ("b", ("spam",), 2), ("c", None, 5))
        ]
        recorder.gate.set()
        await asyncio.gather(*(job.done for job in jobs))

    assert run(scenario).batches[1:] == [(["a", "c"], BatchKey(), 5), (["b"], BatchKey(("spam",)), 2)]


def test_a_request_with_one_decision_for_all_runs_by_itself():
    async def scenario(batcher, recorder):
        await held(batcher, recorder)
        jobs = [batcher.submit(list(names), BatchKey(None, "batch", names), 1) for names in ("ab", "cd")]
        recorder.gate.set()
        await asyncio.gather(*(job.done for job in jobs))

    assert [batch[0] for batch in run(scenario).batches[1:]] == [["a", "b"], ["c", "d"]]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_again():
    async def scenario(batcher, recorder):
        await held(batcher, recorder)
        batcher.submit(list("abcdef"), BatchKey(), 1)
        with pytest.raises(ServiceError) as refused:
            batcher.submit(list("ghi"), BatchKey(), 1)
        assert (refused.value.status, refused.value.code) == (503, "full")
        assert refused.value.retry_after >= 1
        assert batcher.waiting == 6
        batcher.submit(list("gh"), BatchKey(), 1)  # what still has room is taken

    run(scenario)


def test_what_could_not_be_answered_in_time_is_refused_at_once_but_never_for_good():
    async def scenario(batcher, recorder):
        batcher._seconds_each = 3.0  # as if inputs had taken that long
        await held(batcher, recorder)
        batcher.submit(["a"], BatchKey(), 1, within=1.0)  # nothing waits yet
        batcher.submit(["b"], BatchKey(), 1, within=4.0)
        with pytest.raises(ServiceError) as refused:
            batcher.submit(["c"], BatchKey(), 1, within=4.0)
        assert (refused.value.code, refused.value.retry_after) == ("full", 6)

    run(scenario)


def test_a_cancelled_request_leaves_the_queue_and_is_never_run():
    async def scenario(batcher, recorder):
        await held(batcher, recorder)
        cancelled, kept = batcher.submit(list("abc"), BatchKey(), 1), batcher.submit(["d"], BatchKey(), 1)
        batcher.cancel(cancelled)
        assert batcher.waiting == 1
        recorder.gate.set()
        assert tasks(await kept.done) == ["task of d"]

    assert [batch[0] for batch in run(scenario).batches] == [["first"], ["d"]]


def test_a_request_that_is_cancelled_while_it_runs_does_no_harm():
    async def scenario(batcher, recorder):
        batcher.cancel(await held(batcher, recorder))
        recorder.gate.set()
        assert tasks(await batcher.submit(["b"], BatchKey(), 1).done) == ["task of b"]

    run(scenario)


def test_what_a_function_raises_is_the_fault_of_each_input_and_the_thread_goes_on():
    def broken(items, choice, top):
        if "poison" in items:
            raise RuntimeError("poison")
        return [Prediction("fine") for _ in items]

    async def scenario(batcher, recorder):
        outcomes = await batcher.submit(["poison"], BatchKey(), 1).done
        assert isinstance(outcomes[0].result, Fault) and "poison" not in outcomes[0].result.message
        assert tasks(await batcher.submit(["b"], BatchKey(), 1).done) == ["fine"]

    run(scenario, function=broken)


def test_closing_answers_what_waits():
    recorder = Recorder()

    async def main():
        batcher = Batcher(recorder, size=1, wait=0.0, limit=8)
        await held(batcher, recorder)
        job = batcher.submit(["a", "b"], BatchKey(), 1)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        recorder.gate.set()
        await closing
        assert tasks(await job.done) == ["task of a", "task of b"]

    asyncio.run(main())


def test_when_the_process_ends_the_thread_does_not_answer_what_waits():
    async def scenario(batcher, recorder):
        running = await held(batcher, recorder)
        batcher.submit(["a", "b"], BatchKey(), 1)
        batcher._drop()
        recorder.gate.set()
        assert tasks(await running.done) == ["task of first"]
        await asyncio.to_thread(end_background, [batcher._thread])
        assert not batcher._thread.is_alive() and batcher.waiting == 0

    assert len(run(scenario).batches) == 1


# The worker: which input fails, and which do not


def worker(model):
    return Worker(lambda: model, max_text=20, max_pixels=100)


def test_an_input_that_cannot_be_read_fails_alone():
    results = worker(FakeModel())([SentText("a"), "bad", "odd", SentText("b")], BatchKey(), 2)
    assert [getattr(result, "task", None) for result in results] == ["spam", None, None, "spam"]
    assert results[1] == Fault("unreadable", "cannot be read.")
    assert "odd" not in results[2].message


def test_a_batch_that_cannot_be_answered_is_tried_input_by_input():
    model = FakeModel()
    results = worker(model)(["a", "poison", "b"], BatchKey(), 2)
    assert [getattr(result, "code", "fine") for result in results] == ["fine", "internal", "fine"]
    assert [rows for rows, *_ in model.batches] == [["a", "poison", "b"], ["a"], ["poison"], ["b"]]


def test_a_text_that_is_too_long_and_an_image_for_a_text_model_are_told_so():
    from massmerge.serve.worker import SentImage

    long, image = worker(FakeModel())([SentText("x" * 21), SentImage(b"GIF89a")], BatchKey(), 2)
    assert "more than 20 characters" in long.message
    assert "takes text, not images" in image.message
