"""A forked Python process ends as a new one does: status, output, errors and files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.database import IMPORT_PATH
from support.python_processes import PIPE, PythonProcess, forked_commands, run_python

PROGRAMS = {
    "it ends": "import sys; print(sys.argv, __name__); print('printed', file=sys.stderr)",
    "it exits": "import sys; print('buffered'); sys.exit(3)",
    "it exits with a text": "import sys; sys.exit('no such file')",
    "it is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "it is killed before it flushes": "import os, signal; print('lost'); os.kill(os.getpid(), signal.SIGKILL)",
    "it fails": "print('buffered'); 1 / 0",
    "it leaves a file open": "file = open('left', 'w'); file.write('flushed')",
    "it has work for its end": "import atexit; atexit.register(print, 'last'); print('first')",
    "it has a thread": "from threading import *; print(active_count()); Timer(0.01, print, ['later']).start()",
    "it reads": "import sys; print(sys.stdin.read() == '', sys.stdout.isatty())",
    "it looks at itself": "import sys, os; print(sys.modules['__main__'].os is os, os.environ['SHOP'], os.getcwd())",
    "it prints the time": "import time; print(time.localtime(0).tm_hour, time.tzname)",
    "it has mapped classes": (
        "from typing import get_type_hints\n"
        "class Order: pass\n"
        "class Customer: order: 'Order'\n"
        "print(get_type_hints(Customer)['order'] is Order)"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_forked_process_does_what_a_new_one_does(program: str, tmp_path: Path) -> None:
    arguments, environment, left = ("-c", program, "an argument"), {"SHOP": "1", "TZ": "JST-9"}, tmp_path / "left"
    left.write_text("")
    surroundings: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    new = subprocess.run([sys.executable, *arguments], **surroundings, input="", capture_output=True, text=True)
    written = left.read_text()
    left.write_text("")

    forked = run_python(*arguments, **surroundings)

    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]
    assert left.read_text() == written


def test_a_forked_process_refuses_what_only_the_interpreters_start_reads() -> None:
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        run_python("-c", "", env={"PYTHONHASHSEED": "5", "PYTHONUNBUFFERED": "1"})


def test_a_forked_process_starts_forked_processes_itself(tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    forked_commands(tmp_path, [], variables)
    inner = "import os, sys; print('support.entries' in sys.modules, os.getppid())"

    outer = run_python(
        "-c",
        f"from support.python_processes import run_python; print(run_python('-c', {inner!r}).stdout)",
        env=variables,
    )

    has_imports, parent = outer.stdout.split()
    assert has_imports == "True"
    assert int(parent) == int(run_python("-c", "import os; print(os.getppid())").stdout)  # the same server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_forked_process_takes_signals_and_input(number: signal.Signals) -> None:
    program = "import sys, time; print(input(), flush=True); sys.stderr.close(); time.sleep(600)"

    with PythonProcess("-c", program, stdin=PIPE, stdout=PIPE) as process:
        print("heard", file=process.stdin, flush=True)
        assert process.stdout.readline() == "heard\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)

        assert process.wait() == -number
