"""What an attempt of the conformance suite records, beside other attempts of the same process."""

import contextvars
import logging
from collections.abc import Iterator
from threading import Thread

import pytest

from dispatchers.testing.attempts import logged

log = logging.getLogger("crm")


@pytest.fixture(autouse=True)
def root_at_warning() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.WARNING)
    yield
    root.setLevel(level)


def test_the_root_loggers_level_is_restored_when_the_last_attempt_ends() -> None:
    root, handlers = logging.getLogger(), [*logging.getLogger().handlers]
    first, second = logged(), logged()
    contexts = [contextvars.copy_context() for _ in range(2)]

    contexts[0].run(first.__enter__)
    contexts[1].run(second.__enter__)
    contexts[0].run(first.__exit__, None, None, None)
    between = root.level
    contexts[1].run(second.__exit__, None, None, None)

    assert between == logging.INFO
    assert (root.level, root.handlers) == (logging.WARNING, handlers)


def test_an_attempt_records_its_own_lines_and_not_those_of_another() -> None:
    with logged() as outer:
        context = contextvars.copy_context()
        with logged() as inner:
            log.info("of the inner one")
            context.run(log.info, "of the outer one")

    assert (outer, inner) == (["of the outer one"], ["of the inner one"])


def test_a_line_of_a_clients_own_thread_is_recorded() -> None:
    with logged() as lines:
        thread = Thread(target=log.info, args=("in the background",))
        thread.start()
        thread.join()

    assert lines == ["in the background"]


def test_a_lower_level_of_the_root_logger_is_kept() -> None:
    root = logging.getLogger()
    root.setLevel(logging.DEBUG)

    with logged() as lines:
        log.debug("a request")
        level = root.level

    assert (level, lines) == (logging.DEBUG, [])
