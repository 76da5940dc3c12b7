"""How much CPU a process has used."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def process_cpu(pid: int) -> float:
    """Seconds of CPU that a process's threads have used. Source: proc(5), /proc/pid/task/tid/schedstat, else stat in ticks."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if nanoseconds := sum(int(path.read_text().split()[0]) for path in threads):
        return nanoseconds / 1e9
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / TICKS
