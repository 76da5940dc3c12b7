"""How much CPU a process has used."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def process_cpu(pid: int) -> float:
    """Seconds of CPU that a process has used. Source: proc(5), /proc/pid/schedstat, else stat in ticks."""
    schedstat = Path(f"/proc/{pid}/schedstat")
    if schedstat.exists() and (nanoseconds := int(schedstat.read_text().split()[0])):
        return nanoseconds / 1e9
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / TICKS
