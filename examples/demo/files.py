"""The files that the demo's processes write, and that others of them read."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Files:
    """All of them are in one temporary folder."""

    folder: Path

    @property
    def payments(self) -> Path:
        return self.folder / "payments.sqlite"

    @property
    def mails(self) -> Path:
        return self.folder / "mails.jsonl"

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"
