"""The protocol's model, checked: `python3 dev.py model [NAME ...]`.

Each line of runs.tsv is one setting of outbox.pml. With every guard in place its invariants hold; in each mutant they must
fail. Without names all but the long ones are run, with `--all` every one. The verdicts are
recorded in verdicts.tsv. Needs Spin (Debian: spin) and a C compiler.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from operator import add
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE / "outbox.pml"
VERDICTS = HERE / "verdicts.tsv"
"""What Spin found in each run when it last ran, with the digest of what it was given. `dev.py model` writes it."""

TOOLS = ("spin", "cc")
MAX_SECONDS = 1500

COMPILED = {  # how Spin's verifier is built, and run, for each mode
    "bfs": (["-DSAFETY", "-DNOCLAIM", "-DBFS"], []),
    "dfs": (["-DSAFETY", "-DNOCLAIM"], ["-m500000"]),
    "live": (["-DNFAIR=4"], ["-a", "-f", "-m5000000"]),
}
SIZED = {  # the same, for what a run takes: a quick one is over before optimised code or compressed states have paid
    "second": (["-O0"], ["-w20"]),
    "minute": (["-O1", "-DCOLLAPSE"], ["-w24"]),
    "hour": (["-O2", "-DCOLLAPSE"], ["-w24"]),
}


@dataclass(frozen=True)
class Run:
    """One setting. mode: breadth first, depth first (most counterexamples are found sooner), or liveness under fairness.

    takes: a second or a few, which every test run can afford; about a minute on a busy machine; or more, up to an hour.
    """

    name: str
    mode: str
    expected: str
    takes: str
    flags: list[str]
    about: str

    @property
    def digest(self) -> str:
        """Of all that decides the verdict: the model, its flags, and how the verifier is built and run."""
        settings = (self.flags, COMPILED[self.mode], SIZED[self.takes])
        return sha256(MODEL.read_bytes() + repr(settings).encode()).hexdigest()


@dataclass(frozen=True)
class Verdict:
    """found: holds or fails. states: how many were visited. why: the invariant that failed."""

    found: str
    states: str
    why: str


def runs() -> list[Run]:
    lines = (line for line in (HERE / "runs.tsv").read_text().splitlines() if not line.startswith("#"))
    return [
        Run(name, mode, expected, takes, flags.split(), about)
        for name, mode, expected, takes, flags, about in csv.reader(lines, delimiter="\t")
    ]


def verdicts() -> dict[str, tuple[str, str]]:
    """The recorded verdicts: of each run by its name, the digest and what was found."""
    rows = csv.reader(VERDICTS.read_text().splitlines(), delimiter="\t")
    return {name: (digest, found) for name, digest, found in rows}


def record(run: Run, verdict: Verdict) -> None:
    known = verdicts() | {run.name: (run.digest, verdict.found)}
    VERDICTS.write_text("".join(f"{name}\t{digest}\t{found}\n" for name, (digest, found) in sorted(known.items())))


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def check(run: Run) -> Verdict:
    """Build the verifier and let it visit every state. Raises RuntimeError if it reached no verdict."""
    compile_flags, run_flags = map(add, COMPILED[run.mode], SIZED[run.takes])
    with tempfile.TemporaryDirectory() as made:
        shutil.copy(MODEL, made)
        _tool(made, "spin", "-a", *run.flags, MODEL.name)
        _tool(made, "cc", "-w", "-DMEMLIM=9000", *compile_flags, "-o", "pan", "pan.c")
        printed = _tool(made, "./pan", *run_flags)
    errors = re.search(r"errors: (\d+)", printed)
    if errors is None or re.search(r"out of memory|max search depth too small", printed):
        raise RuntimeError(f"{run.name}: no verdict\n{printed}")
    states = re.search(r"^\s*([0-9.e+]+) states, stored", printed, re.M)
    why = re.search(r"^pan:1: (.*?)(?: \(at depth|$)", printed, re.M)
    return Verdict("holds" if errors[1] == "0" else "fails", states[1] if states else "?", why[1] if why else "")


def _tool(directory: str, *command: str) -> str:
    done = subprocess.run(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MAX_SECONDS
    )
    if done.returncode and command[0] != "./pan":
        raise RuntimeError(f"{' '.join(command)} failed\n{done.stdout}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="dev.py model", description=__doc__)
    parser.add_argument("names", nargs="*", help="which runs; by default all but the long ones")
    parser.add_argument("--all", action="store_true", help="every run: about an hour, and 9 GB of memory")
    arguments = parser.parse_args()
    if missing_tools():
        print(f"the model needs {' and '.join(missing_tools())}: apt-get install spin gcc", file=sys.stderr)
        return 2
    chosen = [
        run
        for run in runs()
        if run.name in arguments.names or (not arguments.names and (run.takes != "hour" or arguments.all))
    ]
    surprises = 0
    for run in chosen:
        started = time.monotonic()
        verdict = check(run)
        record(run, verdict)
        as_expected = verdict.found == run.expected
        surprises += not as_expected
        print(
            f"{run.name:<6}{verdict.found:<7}{'' if as_expected else 'UNEXPECTED ':<11}{verdict.states:>12} states"
            f"{time.monotonic() - started:>8.1f} s  {run.about}{': ' + verdict.why if verdict.why else ''}",
            flush=True,
        )
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
