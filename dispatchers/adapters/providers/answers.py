"""The outcome of a service's answer, by its profile. Pure."""

import re
from typing import Any, Final

from dispatchers.adapters.http.meanings import Meaning
from dispatchers.adapters.http.outcomes import is_replayed, meaning_of, outcome_of
from dispatchers.adapters.http_client.transport import Answer
from dispatchers.adapters.providers.json_paths import found
from dispatchers.adapters.providers.operations import Operation
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import UNREADABLE, Duplicate, Signal, parsed
from dispatchers.adapters.retry_after import retry_after
from dispatchers.delivery import Delivered, InProgress, KeyConflict, Outcome, Unknown

WORD: Final = re.compile(r"[\w.:/\[\]-]{1,120}", re.ASCII)
MAX_KEPT_CHARS: Final = 500
MAX_KEPT_ITEMS: Final = 100


def outcome_by(profile: Profile, operation: Operation, answer: Answer) -> Outcome:
    """The outcome of the first of the profile's signals that the answer has, else of its status."""
    body = parsed(answer.body, whole=answer.whole)

    def has(signal: Signal | None) -> bool:
        return signal is not None and signal.is_in(answer.status, answer.headers, body)

    if profile.duplicate is not None and has(profile.duplicate.signal):
        return _outcome_of_duplicate(profile.duplicate, answer.status, body)
    if has(profile.in_flight) and not is_repeated(profile, answer):
        return InProgress(retry_after(answer.headers))
    error = {path: word for path in profile.error if (word := _word(found(body, path))) is not None}
    if has(profile.mismatch):
        return KeyConflict(" ".join([f"HTTP {answer.status}", *map(str, error.values())]))
    own: Meaning | None = next((each for signal, each in profile.errors if has(signal)), None)
    meaning = own or meaning_of(answer.status)
    if meaning == "delivered" and body is UNREADABLE and _may_be_error(profile, answer.status):
        return Unknown(f"HTTP {answer.status}, but its body cannot be read, which would tell a success from a failure")
    return outcome_of(
        answer,
        meaning,
        result=_result(operation.result or profile.result, answer.status, body),
        repeated=is_repeated(profile, answer),
        errors_are_stored=profile.stores == "all",
        error=error,
    )


def _outcome_of_duplicate(duplicate: Duplicate, status: int, body: Any) -> Outcome:
    if duplicate.after_errors:
        return Unknown(f"HTTP {status}: the service knows this key, but not whether it succeeded", final=True)
    return Delivered({"id": duplicate.id and _first(_kept(found(body, duplicate.id)))}, replayed=True)


def is_repeated(profile: Profile, answer: Answer) -> bool:
    """Whether the service says that it repeats an earlier answer."""
    if (replay := profile.replay) is None:
        return is_replayed(answer)
    body = None if replay.body is None else parsed(answer.body, whole=answer.whole)
    return replay.is_in(answer.status, answer.headers, body)


def _may_be_error(profile: Profile, status: int) -> bool:
    """Whether the service reports failures in the body of an answer with this status of a success. 204 has no body."""
    signals = [profile.in_flight, profile.mismatch, *(signal for signal, _ in profile.errors)]
    return status != 204 and any(
        signal is not None and signal.body is not None and signal.status in (None, status) for signal in signals
    )


def _result(paths: tuple[str, ...], status: int, body: Any) -> dict[str, Any]:
    """What is stored of a success: the members that the profile names. All else may be the customer's."""
    if body is UNREADABLE:
        return {"status": status} if not paths else {"status": status, "unparsed": True}
    kept = {path: value for path in paths if (value := _kept(found(body, path))) is not None}
    return {"status": status, **kept}


def _kept(value: Any) -> Any:
    """A text of at most 500 characters, a number, or a list of up to 100 of these; None for everything else."""
    if isinstance(value, list):
        return [_kept(each) for each in value[:MAX_KEPT_ITEMS]]
    return (
        value if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= MAX_KEPT_CHARS) else None
    )


def _first(value: Any) -> Any:
    """The value, or the first item of a list."""
    return (value[0] if value else None) if isinstance(value, list) else value


def _word(value: Any) -> str | int | None:
    """The value if it is the name or number of an error; a text may quote the request."""
    value = _first(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) and WORD.fullmatch(value) else None
