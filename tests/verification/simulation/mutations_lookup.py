"""The mutants of status lookups, each without one guard."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from verification.mutations_decide import moving, rule

from dispatchers import decide, decide_lookup
from dispatchers.delivery import Absent, Found
from dispatchers.time_limits import Memory
from dispatchers.transitions import AwaitLookup, ClaimedEntry, SendAgain, Transition
from simulation.mutants import Patch, around, without

look_up_first = decide._look_up_first


def absent_for_want_of_a_hit(original: Any, entry: ClaimedEntry, lookup: Any, finding: Any, *rest: Any) -> Transition:
    change: Transition = original(entry, lookup, finding if isinstance(finding, Found) else Absent(), *rest)
    return change


def absent_despite_a_hit(original: Any, entry: ClaimedEntry, lookup: Any, finding: Any, *rest: Any) -> Transition:
    change: Transition = original(entry, lookup, Absent() if isinstance(finding, Found) else finding, *rest)
    return change


def absent_under_every_key(original: Any, entry: ClaimedEntry, *rest: Any) -> Transition:
    change: Transition = original(entry._replace(key_epoch=0), *rest)
    return change


def looking_up_at_once(entry: ClaimedEntry, change: Transition, memory: Memory, now: datetime) -> Transition:
    """No time is left for the senders that may still be at work."""
    sought = look_up_first(entry, change, memory, now)
    if not isinstance(sought, AwaitLookup):
        return sought
    return replace(sought, delay=timedelta(0), lookup=sought.lookup._replace(fenced_at=now))


LOOKUP_GUARDS: dict[str, Patch] = {
    "CannotTell counts as proof of absence": around(decide, "judge", absent_for_want_of_a_hit),
    "what is found counts as absence": around(decide, "judge", absent_despite_a_hit),
    "absence under the present key counts for all keys": around(decide, "judge", absent_under_every_key),
    "a status lookup needs no fencing delay": rule(_look_up_first=looking_up_at_once),
    "absence has no limit": without(decide_lookup, "_limit", lambda entry, attempts, memory, now: None),
    "a due status lookup is not stored": moving(AwaitLookup, outcome=None),
    "proof of absence is not put on record": moving(SendAgain, outcome=None),
}
