"""The order in which a dispatcher asks its destinations. One that could not be asked keeps its turn. No I/O."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator


class Turns:
    """First come those that a claim has left out, then those that hints have named, then the others, round by round.

    own: destinations that are always known.
    """

    def __init__(self, own: Iterable[str]) -> None:
        self.own = frozenset(own)
        self._names = OrderedDict.fromkeys(sorted(self.own))  # in the order of the next claims
        self._held: dict[str, None] = {}  # a shared budget was used up: they are asked when it has room again
        self._owed: dict[str, None] = {}  # a full claim may not have reached them
        self._hinted: dict[str, None] = {}
        self._hinted_since: set[str] = (
            set()
        )  # named by hints since the last sweep, which may have begun before the commit
        self._unasked = 0  # destinations in `_names` that this round has not asked yet

    @property
    def names(self) -> Collection[str]:
        """All known destinations."""
        return tuple(self._names)

    @property
    def are_hinted(self) -> bool:
        """Whether hints have named destinations that were not asked since."""
        return bool(self._hinted)

    @property
    def held(self) -> Collection[str]:
        """The destinations that wait until a used-up budget has room again."""
        return self._held.keys()

    @property
    def are_over(self) -> bool:
        """Whether every destination was asked that need not wait for a budget."""
        return self._unasked <= 0 and not (self._hinted or self._owed)

    def begin_round(self) -> None:
        self._unasked = len(self._names)

    def learn(self, found: Iterable[str]) -> None:
        """Set the destinations with entries, and begin a round."""
        known = self.own.union(found, self._hinted_since)
        self._hinted_since.clear()
        kept = [name for name in self._names if name in known]
        new = sorted(known.difference(kept))
        self._names = OrderedDict.fromkeys([*new, *kept])  # new ones come first, the others keep their order
        for waiting in (self._held, self._owed):
            for name in [name for name in waiting if name not in known]:
                del waiting[name]
        self.begin_round()

    def hint(self, found: Iterable[str]) -> None:
        """Hints have named these destinations. If no round is running, no others are asked."""
        names = sorted(set(found))
        self._hinted_since.update(names)
        self._names.update(dict.fromkeys(name for name in names if name not in self._names))
        self._hinted.update(dict.fromkeys(names))

    def hold(self, name: str) -> None:
        """Keep the turn of a destination for which a budget had no room."""
        self._held[name] = None

    def owe(self, names: Iterable[str]) -> None:
        """Ask these destinations first in the next claim: this one may not have reached them."""
        self._owed.update(dict.fromkeys(name for name in names if name in self._names))

    def next(self, *, with_held: bool) -> Iterator[str]:
        """Whom to ask, once each. A destination has had its turn when the iterator has named it.

        with_held: whether the budget has room again.
        """
        is_round = self._unasked > 0 or not self._hinted
        named: set[str] = set()
        for waiting in (self._held, self._owed, self._hinted) if with_held else (self._owed, self._hinted):
            while waiting:
                name = next(iter(waiting))
                del waiting[name]
                if name not in named:
                    named.add(name)
                    yield name
        for _ in range(len(self._names) if is_round else 0):
            name = next(iter(self._names))
            self._names.move_to_end(name)
            self._unasked -= 1
            if name not in named:
                yield name
