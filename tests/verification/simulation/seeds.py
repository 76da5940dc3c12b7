"""How many seeds the suite plays, and by which of them it finds what few find: the rest is for `dev.py simulate`."""

SEEDS_IN_CI = 150
"""What is broken as often as most mutants break it is seen in every run. `dev.py simulate` plays as many more as it is given."""

SEEDS_TO_FIND = 3000

FOUND_BY = {
    "the pin changes after a possible send": 14,
    "CannotTell counts as proof of absence": 15,
    "what is found counts as absence": 15,
    "an entry without an adapter fails": 17,
    "a callback runs without the fence": 17,
    "a head that is being taken out is waited for like any other": 17,
    "a claim does not take its permits": 17,
    "in progress leaves no doubt": 18,
    "a retry-after is honoured beyond the age": 18,
    "a block keeps no entry waiting": 27,
    "permits are free before their lease ends": 34,
    "a pause is heeded only by who has heard of it": 44,
    "uncertain with a callback due forgets since when": 50,
    "another timeline is noticed by the sweep only": 56,
    "absence under the present key counts for all keys": 62,
    "a status lookup needs no fencing delay": 64,
    "who is followed by a locked one leaves all the same": 65,
    "what is delivered after all leaves its group blocked": 73,
    "the fence is gone": 79,
    "send again does not wait for earlier senders": 96,
    "every rejection is taken for conclusive": 99,
    "every claim bears the same token": 102,
    "the permits that others have taken are not counted": 102,
    "a release makes no next entry due": 115,
    "resuming doubts nothing": 126,
    "doubt begins when an operator resumes": 126,
    "a cancellation makes no next entry due": 145,
    "what was sent before a restore is cancelled": 207,
    "a key conflict is taken for failure": 211,
    "a conclusive rejection speaks for earlier keys": 218,
    "a late failure is taken": 384,
    "what is absent does not wait for those that were let by": 538,
    "what is paused grows older": 583,
}
"""Where the search for a mutant begins. It continues from 0 if a change has made another run of that seed.

Written by `python3 dev.py simulate --mutants --jobs 2`.
"""
