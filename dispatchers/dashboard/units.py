"""Numbers, sizes and durations as people read them."""

from datetime import datetime
from itertools import pairwise

from dispatchers.admin.read.counts import Count

UNITS = (("day", 86_400), ("h", 3600), ("min", 60), ("s", 1))
NONE = "–"


def number_text(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def limited_text(count: Count) -> str:
    """A count up to a limit: `1,000+` if there may be more."""
    return number_text(count.value) + ("" if count.is_exact else "+")


def bytes_text(count: float | None) -> str:
    """In decimal units, three digits."""
    if count is None:
        return "unknown size"
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:,.0f} TB"


def duration_text(seconds: float | None) -> str:
    """In its two largest units: `250 ms`, `2.5 s`, `2 min 5 s`, `3 h 20 min`, `1 day 4 h`."""
    if seconds is None:
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    rest = round(seconds)
    for (unit, size), (next_unit, next_size) in pairwise(UNITS):
        if rest >= size:
            parts = [_part(rest // size, unit), _part(rest % size // next_size, next_unit)]
            return " ".join(part for part in parts if part)
    return f"{rest} s"


def relative_text(at: datetime, now: datetime) -> str:
    """In its largest unit: `3 min ago`, `in 2 h`."""
    seconds = int(abs((at - now).total_seconds()))
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    length = _part(seconds // size, unit) or "0 s"
    return f"in {length}" if at > now else f"{length} ago"


def _part(count: int, unit: str) -> str:
    if not count:
        return ""
    return f"{count:,} {unit}{'s' if unit == 'day' and count > 1 else ''}"
