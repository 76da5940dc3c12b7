"""New environments in which a release is installed as its readers install it."""

import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

from support.docs_pages import ROOT

UV = str(Path(sys.executable).parent / "uv")
LEFTOVERS = shutil.ignore_patterns(".*", "__pycache__", "dist", "*.egg-info")


class Environments:
    """Makes an environment for each set of packages that is asked for, with the versions of requirements.lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def make(self, packages: str) -> Path:
        """An environment's Python, after `pip install` of these packages: ours, with its extras, is this checkout's wheel."""
        if packages not in self._made:
            home = self._folder / str(len(self._made))
            run(UV, "venv", "--quiet", "--python", sys.executable, str(home))
            ours = [re.sub(r"^sqlalchemy-outbox(\[.*\])$", rf"{self._wheel}\1", name) for name in shlex.split(packages)]
            python = home / "bin" / "python"
            constraint = str(ROOT / "requirements.lock")
            run(UV, "pip", "install", "--quiet", "--python", str(python), "--constraint", constraint, *ours)
            self._made[packages] = python
        return self._made[packages]

    @cached_property
    def _wheel(self) -> Path:
        return build("wheel", ROOT, self._folder / "wheel")


def build(kind: str, source: Path, target: Path) -> Path:
    """The `wheel` or `sdist` of the checkout in `source`."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target), cwd=source)
    (built,) = target.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind])
    return built


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
