"""Threads in the background end before the process does."""

import threading

from massmerge.io.background import Background, end_background


def test_a_thread_is_told_to_end_and_waited_for():
    told, ended = threading.Event(), []
    thread = Background(lambda: (told.wait(30), ended.append("by itself")), told.set)
    thread.start()
    end_background([thread])
    assert ended == ["by itself"] and not thread.is_alive()


def test_one_that_does_not_end_is_left_behind_after_a_while():
    gate = threading.Event()
    thread = Background(lambda: gate.wait(30), lambda: None)
    thread.start()
    end_background([thread], within=0.01)
    assert thread.is_alive()
    gate.set()
    thread.join()


def test_a_thread_that_is_done_or_was_never_started_is_left_alone():
    told = []
    done, new = (Background(lambda: None, lambda: told.append("to end")) for _ in range(2))
    done.start()
    done.join()
    end_background([done, new])
    assert told == []


def test_what_a_thread_held_is_let_go_when_it_is_done():
    class Held:
        def work(self): ...

    held = Held()
    thread = Background(held.work, held.work)
    thread.start()
    thread.join()
    assert vars(thread)["_work"] is vars(thread)["_quit"] is not held.work
