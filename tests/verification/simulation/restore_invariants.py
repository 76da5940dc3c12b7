"""What is promised of a database that was set back: nothing is claimed of it until a person resumes.

What was sent since the backup is still known here, so whatever else is promised is checked against that too.
"""

from copy import copy
from dataclasses import replace
from uuid import UUID

from dispatchers.transitions import ClaimedEntry
from simulation.trace import Story, Truth


class RestorePromises:
    """Keeps what the database has of each story, so that it can be set back with it; what happened cannot be."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._is_set_back = False
        self._kept: dict[UUID, Story] = {}

    def backup(self) -> None:
        self._kept = {id: replace(story, told=copy(story.told)) for id, story in self._truth.stories.items()}

    def restored(self) -> None:
        self._truth.note("the database is set back")
        self._is_set_back = True
        for id, story in self._truth.stories.items():
            kept = self._kept.get(id, Story())
            story.lease, story.deliveries, story.told = kept.lease, kept.deliveries, copy(kept.told)
            story.was_in_doubt, story.in_doubt = kept.was_in_doubt, kept.in_doubt
            story.is_cancelled_by_app = kept.is_cancelled_by_app
            story.sends_before = len(story.sends)  # nobody can count those that were forgotten
            story.was_set_back = True
            row = self._truth.store.queue.get(id)
            if id not in self._truth.store.entries:
                self._forget(story, 0)
            elif row is not None:
                self._forget(story, row.key_epoch + 1)

    def _forget(self, story: Story, epoch: int) -> None:
        """That it was sent under this key, or a later one, is beyond what anyone can know: the key is lost with the rest.

        Likewise of an entry that is lost itself, should it be asked for once more.
        """
        story.late_effects = sum(count for each, count in story.effects.items() if each >= epoch)
        for send in story.sends:
            if send.claimed.key_epoch >= epoch:
                send.harmless = send.too_late = send.is_forgotten = True

    def resumed(self) -> None:
        self._truth.note("a person resumes")
        self._is_set_back = False
        for id, row in self._truth.store.queue.items():
            story = self._truth.story(id)
            story.was_in_doubt, story.in_doubt = row.maybe_sent, (row.key_epoch, row.in_doubt_since)

    def claimed(self, entries: list[ClaimedEntry]) -> None:
        for entry in entries:
            self._truth.require(not self._is_set_back, entry.id, "claimed of a database that was set back")
