"""`python -m examples.demo` whose own processes are forked, which spares each of them the imports.

FORK_SERVER names the server. Whatever the demo does to its processes, it does to the forked ones.
"""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from examples.demo import children, operator_decision
from examples.demo.__main__ import main
from support.python_processes import PythonProcess


class ForkedChild(PythonProcess):
    """Takes what `Children.start` gives to `subprocess.Popen`, and yields bytes as that does."""

    def __init__(self, command: Sequence[str], *, start_new_session: bool, preexec_fn: object, **settings: Any) -> None:
        _, *arguments = command  # the interpreter
        super().__init__(*arguments, **settings)
        assert self.stdout is not None
        self.stdout = self.stdout.detach()  # type: ignore[attr-defined]


def run_forked(command: Sequence[str], *, text: bool, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Of `subprocess.run`, what the operator's command needs."""
    with PythonProcess(*command[1:], **settings) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        return subprocess.CompletedProcess(command, process.wait(), printed)


for module, replaced in ((children, {"Popen": ForkedChild}), (operator_decision, {"run": run_forked})):
    vars(module)["subprocess"] = SimpleNamespace(**vars(subprocess) | replaced)
sys.exit(main())
