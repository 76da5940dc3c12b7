"""The demo as users run it: it ends well on both databases, fails where it must, and leaves nothing over."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from support.open_demo import ROOT, demo_process
from support.python_processes import PythonProcess

MAX_RUN_SECONDS = 450  # three runs side by side take about forty on an idle machine; a busy one may take ten times that


@contextmanager
def demo(*arguments: str) -> Iterator["Run"]:
    """A run of the demo; whatever it has started ends with the block."""
    with TemporaryFile("w+") as output, demo_process(*arguments, stdout=output) as process:
        try:
            yield Run(process, output)
        finally:
            process.send_signal(signal.SIGTERM)  # a no-op once it has ended


class Run(NamedTuple):
    process: PythonProcess
    output: IO[str]

    def result(self) -> tuple[int, str]:
        """Its exit status and what it has printed, when it has ended."""
        status = self.process.wait(MAX_RUN_SECONDS)
        self.output.seek(0)
        return status, self.output.read()


def counts(output: str, words: str) -> tuple[int, int]:
    """The figures after these words in the last table: of charges, of receipts."""
    found = re.search(rf"│ *{re.escape(words)} *│ *(\d+) *│ *(\d*) *│", output)
    assert found, output
    return int(found[1]), int(found[2] or 0)


def count(output: str, words: str) -> int:
    """The figures after these words in the table before."""
    found = re.search(rf"│ *{re.escape(words)} *│ *(\d+) *│\n", output)
    assert found, output
    return int(found[1])


def check_that_one_was_resolved(output: str) -> None:
    """If there is anything uncertain to show it on, which chance decides."""
    if "No entry is uncertain: the operator has nothing to resolve." in output:
        return
    typed = re.search(r"\n\$ outbox resolve (\S+) --(happened|did-not-happen) --reason ", output)
    assert typed, output
    id, verdict = typed.groups()
    did = {"happened": "it happened", "did-not-happen": "it did not happen and will not"}[verdict]
    assert f"\nentry {id}: {did}; a running dispatcher will settle it, callbacks included\n" in output
    settled = "delivered" if verdict == "happened" else "failed"
    assert re.search(rf"\n  its (charge|receipt) is now {settled}\n", output), output
    assert f"{id}" in output.partition("The operator resolved one entry (see above):")[2]


def test_the_demo_does_everything_once_and_fails_where_keys_are_forgotten() -> None:
    """Three runs of half a minute, most of it waiting: side by side, and so in one test."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(demo(*arguments.split()))
            for arguments in ("--orders 20", "--orders 20 --sqlite", "--orders 40 --forgetful --sqlite")
        ]
        postgresql, sqlite, (forgetful_status, forgetful) = (run.result() for run in runs)

    for (status, output), database in ((postgresql, "PostgreSQL"), (sqlite, "SQLite")):
        assert status == 0, output
        assert output.startswith("20 customers check out"), output
        assert re.search(rf"│ checkouts, on [\w ]*{database}[^│]*│ 20 │", output), output
        assert count(output, "kills of the dispatcher (SIGKILL), while it was sending") > 0
        check_that_one_was_resolved(output)
        orders, receipts = counts(output, "expected: orders answered 201, receipts of charged orders")
        charged, mailed = counts(output, "happened once; the outbox reports delivered")
        unsure = counts(output, "the outbox reports uncertain")
        assert orders == 20
        assert receipts == charged == 20 - unsure[0] - count_of_failed(output, 0)
        assert mailed == receipts - unsure[1] - count_of_failed(output, 1)
        assert counts(output, "happened twice or more") == (0, 0)
        assert counts(output, "missing and not reported") == (0, 0)
        assert output.endswith(
            "\nPASSED: nothing charged or mailed twice, nothing missing;"
            f" the outbox reports {unsure[0]} charges and {unsure[1]} receipts as uncertain\n"
        )

    assert forgetful_status == 1, forgetful
    assert "In this run the payment service forgets every key at once" in forgetful
    assert counts(forgetful, "expected: orders answered 201, receipts of charged orders")[0] == 40
    assert counts(forgetful, "happened twice or more")[0] > 0
    assert counts(forgetful, "repeated requests that the service recognised by the key")[0] == 0
    assert re.search(r"\n  order \S+: charge delivered, but charged [2-9] times\n", forgetful)
    assert re.search(r"\nFAILED: \d+ problems\n$", forgetful)


def count_of_failed(output: str, column: int) -> int:
    """Those that an operator found not to have happened: the line is there only if there are some."""
    words = "did not happen; the outbox reports failed"
    return counts(output, words)[column] if words in output else 0


def test_a_killed_demo_leaves_no_folder() -> None:
    program = (
        "import time\n"
        "from examples.demo.folder import temporary_folder\n"
        "with temporary_folder('outbox-demo-test-') as folder:\n"
        "    (folder / 'shop.sqlite').touch()\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "shop.sqlite").exists()

        process.kill()
        process.stdout.read()  # until the process that removes the folder, and has inherited it, has ended too

        assert not folder.exists()
