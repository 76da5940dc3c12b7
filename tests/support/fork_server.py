"""A process that has imported what Python programs import, and forks a child for each: started by support/python_processes.py.

It has no threads and no connections. So a child differs from a new process in one way only: the imports are done. It takes its
arguments, variables, directory and open files from the request, runs the program as `__main__`, and ends as every Python
process ends: with its threads joined, its `atexit` functions called and its buffers flushed.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pkgutil import resolve_name
from types import ModuleType

NUMBER = struct.Struct("!q")
"""What the server writes to a program's channel: the process id, then, when the program has ended, its exit status."""

MAX_REQUEST_FILES = 5
"""A program's channel, stdin, stdout and stderr, and the socket of a fork server if it starts programs itself. They come by the
control socket; the request itself by the channel.
"""


def serve(control: socket.socket) -> None:
    """Fork a child for each request, and report how each ended, until the other end is closed. Returns only in a child."""
    channels: dict[int, int] = {}
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, the children too
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            report_ended(channels)
        if control in ready:
            _, files, _, _ = socket.recv_fds(control, 1, MAX_REQUEST_FILES)
            if not files:
                sys.exit()
            with open(files[0], "rb", closefd=False) as channel:
                request = json.loads(channel.readline())
            if (pid := os.fork()) == 0:
                for each in (control, woken, waker):
                    each.detach()
                become(files[1:], **request)
                return
            os.write(files[0], NUMBER.pack(pid))
            channels[pid] = files[0]
            for file in files[1:]:
                os.close(file)


def report_ended(channels: dict[int, int]) -> None:
    while channels:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with suppress(BrokenPipeError), open(channels.pop(pid), "wb", buffering=0) as channel:
            channel.write(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def become(files: list[int], arguments: list[str], directory: str, variables: dict[str, str]) -> None:
    """Make this child what a new process is when its program begins."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(len(files), 1024)
    os.environ.clear()
    os.environ.update(variables)
    if len(files) > 3:
        os.environ["FORK_SERVER"] = "3"
    time.tzset()
    os.chdir(directory)
    buffering = 1 if variables.get("PYTHONUNBUFFERED") else -1
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv = arguments
    home = os.path.dirname(os.path.abspath(arguments[0])) if arguments[0] not in ("-m", "-c", "-") else directory
    added = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [home, *(os.path.abspath(path) for path in added if path), *INSTALLED]
    importlib.invalidate_caches()


def run(arguments: list[str]) -> None:
    match arguments:
        case ["-m", name, *_]:
            del arguments[0]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *_]:
            del arguments[1]
            run_code(code, "<string>")
        case ["-", *_]:
            run_code(sys.stdin.read(), "<stdin>")
        case [path, *_]:
            runpy.run_path(path, run_name="__main__")


def run_code(code: str, name: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, name, "exec"), vars(main))


def end(status: list[int]) -> None:
    """Close what the program left open, and leave out the rest of the interpreter's end: taking all modules apart costs most."""
    if status:
        del sys.modules["__main__"]
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


def load(names: list[str]) -> None:
    for name in names:
        resolve_name(name)
    gc.collect()
    gc.freeze()  # the collector would copy what the children share


if __name__ == "__main__":
    status: list[int] = []
    atexit.register(end, status)  # the first, and so the last that is called
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    INSTALLED = [path for path in sys.path[1:] if path not in given]
    with socket.socket(fileno=int(sys.argv[1])) as control:
        load(sys.argv[2:])
        serve(control)
    try:
        run(sys.argv)
        status.append(0)
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            status.append(ended.code or 0)
        raise
