"""What the mail server really did, one JSON line each: an audit reads it from another process."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A message that the server accepted, and so delivers. reply_lost: its sender got no reply."""

    message_id: str
    key: str
    recipient: str
    order_id: str
    subject: str
    reply_lost: bool


@dataclass(frozen=True, slots=True)
class MailLedger:
    """accepted: in order. turned_away: how often the server took nothing, by the way in which it said so."""

    accepted: list[Mail] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return sum(mail.reply_lost for mail in self.accepted)


class MailRecord:
    """Where the server writes it, each line at once: a fake must survive a crash of the app, not of the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def accept(self, mail: Mail) -> None:
        self._write({"accepted": asdict(mail)})

    def turn_away(self, how: str) -> None:
        self._write({"turned_away": how})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_mails(path: Path) -> MailLedger:
    """Read everything that is written in full so far."""
    ledger = MailLedger()
    *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
    for line in map(json.loads, lines):
        if "accepted" in line:
            ledger.accepted.append(Mail(**line["accepted"]))
        else:
            ledger.turned_away[line["turned_away"]] += 1
    return ledger
