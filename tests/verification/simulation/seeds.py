"""How many seeds the suite plays, and by which of them it finds what few find: the rest is for `dev.py simulate`."""

SEEDS_IN_CI = 500
"""As many as each of the bugs is found in: an invariant that is broken as easily as that is seen in every run."""

SEEDS_TO_FIND = 1000

FOUND_BY = {
    "send again clears doubt": 11,
    "send again forgets when the key was first sent": 11,
    "proof of absence is not put on record": 11,
    "an entry that awaits a status lookup is sent": 12,
    "what is found counts as absence": 12,
    "a due status lookup is not stored": 12,
    "CannotTell counts as proof of absence": 13,
    "the pin changes after a possible send": 14,
    "an uncertain entry does not block its group": 17,
    "a claim does not take its permits": 17,
    "every rejection is taken for conclusive": 24,
    "what is uncertain is waited for even after a release": 25,
    "failure_blocks_group=False of an adapter is ignored": 25,
    "what is delivered after all leaves its group blocked": 27,
    "age has no limit": 33,
    "a retry-after is honoured beyond the age": 33,
    "a cancellation makes no next entry due": 34,
    "the permits that others have taken are not counted": 34,
    "permits are free before their lease ends": 34,
    "what is known is not put on record when a callback fails": 37,
    "a pause is heeded only by who has heard of it": 38,
    "the window makes no allowance for the send and the clocks": 43,
    "absence under the present key counts for all keys": 44,
    "resuming doubts nothing": 56,
    "doubt begins when an operator resumes": 56,
    "a failed entry does not block its group": 60,
    "a release makes no next entry due": 60,
    "send again does not wait for earlier senders": 65,
    "what was sent before a restore is cancelled": 78,
    "what is absent does not wait for those that were let by": 81,
    "absence has no limit": 106,
    "a block keeps no entry waiting": 106,
    "the lease is measured from the claim's answer": 129,
    "uncertain with a callback due forgets since when": 147,
    "who is followed by a locked one leaves all the same": 151,
    "a key conflict is taken for failure": 171,
    "another timeline is noticed by the sweep only": 177,
    "a conclusive rejection speaks for earlier keys": 220,
    "what is paused grows older": 344,
    "a status lookup needs no fencing delay": 498,
    "a head that is being taken out is waited for like any other": 1133,
}
"""Where the search for a mutant begins. It continues from 0 if a change has made another run of that seed.

Written by `python3 dev.py simulate --mutants --jobs 2`.
"""
