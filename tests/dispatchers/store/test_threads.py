"""The store's threads, while a database hangs."""

import threading
from threading import Barrier, Event

from support.daemons import wait_for

from dispatchers.threads import Threads

WAIT = 60


def alive(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_thread_that_hung_ends_when_another_has_its_place() -> None:
    threads, name, begun, released = Threads(2, "hanging"), "hanging", Barrier(2), Event()

    def hang() -> None:
        begun.wait(WAIT)
        released.wait(WAIT)

    for _ in range(5):  # as while a database hangs: each wait is given up, and the next work hangs too
        answer = threads.submit(hang)
        begun.wait(WAIT)
        threads.give_up(answer)
    assert alive(name) >= 5
    released.set()

    wait_for(lambda: alive(name) == 2, "the end of the threads that hung")
    threads.close()


def test_work_that_was_given_up_before_it_began_never_begins() -> None:
    threads, begun, released, done = Threads(1, "hanging"), Barrier(2), Event(), list[str]()

    def hang() -> None:
        begun.wait(WAIT)
        released.wait(WAIT)

    first = threads.submit(hang)
    begun.wait(WAIT)
    late = threads.submit(done.append, "a claim whose answer is not awaited")
    threads.give_up(late)
    threads.give_up(first)

    threads.submit(done.append, "the next").result(WAIT)
    released.set()
    first.result(WAIT)

    assert done == ["the next"]
    threads.close()
