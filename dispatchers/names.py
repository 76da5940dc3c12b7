"""Dotted names: the prefixes of one, and the known name that is most like one that fits nothing. Pure."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

LIKENESS = 0.65  # of 1: one or two letters of a word, or two swapped in a short one; not another word


def prefixes(name: str) -> Iterator[str]:
    """The name and its dotted prefixes, the longest first: `stripe.refunds.create`, `stripe.refunds`, `stripe`."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, if one is."""
    found = get_close_matches(name, list(known), n=1, cutoff=LIKENESS)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], better: str | None = None) -> str:
    """The end of a sentence about `name`; empty if nothing is like it. better: a known name to be preferred."""
    found = better or nearest(name, known)
    return f"; did you mean {found!r}?" if found and found != name else ""
