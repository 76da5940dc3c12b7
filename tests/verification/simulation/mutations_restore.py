"""The guards of a database that was set back, each removed by itself."""

from typing import Any

from simulation import reference, reference_history
from simulation.mutants import Patch, around, without
from simulation.reference import ReferenceStore
from simulation.reference_rows import WAITING, Row


def suspended_on_record_only(tables: Any) -> bool:
    return tables.meta.suspended is not None


def from_now_on(original: Any, tables: Any, env: str, why: str, since: Any = None) -> None:
    original(tables, env, why, tables.clock())


def cancelled_all_the_same(store: ReferenceStore, row: Row) -> bool:
    return row.state in WAITING and row.lease_token is None and not row.maybe_sent


RESTORE_GUARDS: dict[str, Patch] = {
    "a claim does not ask whether commits are missing": without(ReferenceStore, "_is_trusted", lambda *_: True),
    "another timeline is noticed by the sweep only": without(reference, "is_suspended", suspended_on_record_only),
    "what was sent before a restore is cancelled": without(ReferenceStore, "_may_be_cancelled", cancelled_all_the_same),
    "resuming doubts nothing": without(reference_history, "_doubt", lambda row, since: False),
    "doubt begins when an operator resumes": around(reference_history, "resume", from_now_on),
}
