"""How the pages name each decision, about one entry and in bulk, what follows from it, and the command that makes it."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeAlias
from uuid import UUID

from dispatchers.admin.decide.effects import Action
from dispatchers.admin.decide.rules import Verdict
from dispatchers.admin.decide.safe import Decision
from outbox.errors import ConfigurationError


class DecisionText(NamedTuple):
    """label: on its button. follows: what a dispatcher does then. words: of the command, its name and options."""

    label: str
    follows: str
    words: tuple[str, tuple[str, ...]]
    may_harm: bool = False

    def command(self, id: UUID) -> str:
        """The equivalent command line."""
        name, options = self.words
        return " ".join(["outbox", name, str(id), *options, '--reason "..."'])


TEXTS: Mapping[Decision, DecisionText] = {
    "look_up": DecisionText(
        "Look it up again",
        "A dispatcher asks the service now. It sends the entry again only if the service proves that it did not happen.",
        ("lookup", ()),
    ),
    "same_key": DecisionText(
        "Send again under the same key",
        "The service remembers the key: if it happened, the service only repeats its answer.",
        ("resend", ("--key", "same")),
    ),
    "new_key": DecisionText(
        "Send again under a new key",
        "The service has never seen the new key. If it happened before, it happens twice: ask the service first.",
        ("resend", ("--key", "new")),
        may_harm=True,
    ),
    "happened": DecisionText(
        "It happened",
        "You have asked the service. The entry becomes delivered, and its callback runs.",
        ("resolve", ("--happened",)),
    ),
    "did_not_happen": DecisionText(
        "It did not happen, and will not",
        "You have asked the service. The entry becomes failed, and its callback runs.",
        ("resolve", ("--did-not-happen",)),
        may_harm=True,
    ),
    "retry": DecisionText("Retry now", "The entry is due now. Its attempts and its limits still count.", ("retry", ())),
    "cancel": DecisionText(
        "Cancel", "The entry was not sent, and will not be. Its callback runs.", ("cancel", ()), may_harm=True
    ),
    "release": DecisionText("Release", "The entry is no longer suspended.", ("release", ())),
    "again": DecisionText(
        "Ask again",
        "A new entry has the same payload and a new key: for the service it is a new effect. This entry stays as it is.",
        ("again", ()),
    ),
}


BulkName: TypeAlias = Literal["retry", "cancel", "release", "happened", "did_not_happen", "send_again", "again"]


class BulkText(NamedTuple):
    """label, follows, may_harm: as of `DecisionText`. action, verdict: what it is in bulk."""

    label: str
    follows: str
    action: Action
    verdict: Verdict | None = None
    may_harm: bool = False


BULK: Mapping[BulkName, BulkText] = {
    "retry": BulkText(TEXTS["retry"].label, "They are due now. Their attempts and their limits still count.", "retry"),
    "cancel": BulkText("Cancel", "They were not sent, and will not be. Their callbacks run.", "cancel", may_harm=True),
    "release": BulkText("Release", "They are no longer suspended.", "release"),
    "happened": BulkText(
        "They happened",
        "You have asked the service. They become delivered, and their callbacks run.",
        "resolve",
        "happened",
    ),
    "did_not_happen": BulkText(
        "They did not happen, and will not",
        "You have asked the service. They become failed, and their callbacks run.",
        "resolve",
        "did_not_happen",
        may_harm=True,
    ),
    "send_again": BulkText(
        "Send them again",
        "What happened before may then happen twice: ask the service first.",
        "resolve",
        "send_again",
        may_harm=True,
    ),
    "again": BulkText(
        TEXTS["again"].label,
        "New entries have the same payloads and new keys: for the service they are new effects. These entries stay as they are.",
        "again",
    ),
}


def name_of(action: Action, verdict: Verdict | None) -> BulkName:
    """The name of a decision in bulk."""
    return next(name for name, text in BULK.items() if (text.action, text.verdict) == (action, verdict))


def checked_second_person(names: Collection[str]) -> frozenset[str]:
    """The decisions that need a second person. Raises `ConfigurationError` for another name."""
    if isinstance(names, str) or not set(names) <= set(BULK):
        raise ConfigurationError(f"second_person={names!r}: give a list of {', '.join(BULK)}")
    return frozenset(names)
