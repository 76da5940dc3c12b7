"""The mails of the mail service's ledger: an audit reads them from another process."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A mail that the service accepted. key: the child key in its metadata. reply_lost: its sender got no reply."""

    message_id: str
    key: str
    recipient: str
    order_id: str
    subject: str
    reply_lost: bool

    @classmethod
    def of(cls, effect: dict[str, Any]) -> "Mail":
        payload, metadata = effect["payload"], effect["payload"]["Metadata"]
        return cls(
            message_id=effect["id"],
            key=metadata["outbox_key"],
            recipient=payload["To"],
            order_id=metadata["order_id"],
            subject=payload["Subject"],
            reply_lost=effect["answer_lost"],
        )


@dataclass(frozen=True, slots=True)
class MailLedger:
    """accepted: in order. turned_away: how often the service took nothing, by the status of its answer."""

    accepted: list[Mail] = field(default_factory=list)
    turned_away: Counter[int] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        return sum(mail.reply_lost for mail in self.accepted)


def read_mails(path: Path) -> MailLedger:
    """Read everything that is written in full so far."""
    ledger = MailLedger()
    *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
    for line in map(json.loads, lines):
        if "effect" in line:
            ledger.accepted.append(Mail.of(line["effect"]))
        elif line["answer"]["status"] >= 400:
            ledger.turned_away[line["answer"]["status"]] += 1
    return ledger
