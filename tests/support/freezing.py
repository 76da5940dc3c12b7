"""How a test makes a child process hang: it is stopped, and its connections stay open."""

import os
import signal
import subprocess


def freeze(process: subprocess.Popen[bytes]) -> None:
    """Returns when all threads of the process are stopped: until then, one of them may still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
