"""How many seeds the suite plays, and by which of them it finds what few find: the rest is for `dev.py simulate`."""

SEEDS_IN_CI = 700
"""As many as each of the bugs is found in: an invariant that is broken as easily as that is seen in every run."""

SEEDS_TO_FIND = 1000

FOUND_BY = {
    "a block holds nobody back": 12,
    "a claim does not ask whether commits are missing": 22,
    "in progress leaves no doubt": 24,
    "in progress is taken for success": 24,
    "the lease is measured from the claim's answer": 25,
    "what is uncertain is waited for even after a release": 25,
    "an adapter's word that groups go on is not heeded": 25,
    "attempts have no limit": 27,
    "a vanished sender counts as no attempt": 27,
    "what is known is not put on record when a callback fails": 35,
    "a head that is being taken out is waited for like any other": 38,
    "a retry-after is honoured beyond the age": 64,
    "a claim does not take its permits": 72,
    "what was sent before a restore is cancelled": 78,
    "resuming doubts nothing": 85,
    "who is followed by a locked one leaves all the same": 99,
    "a release lets nobody come": 99,
    "the permits that others have taken are not counted": 102,
    "every claim bears the same token": 116,
    "absence under the present key counts for all keys": 121,
    "a key conflict is taken for failure": 139,
    "what is delivered after all leaves its group blocked": 144,
    "another timeline is noticed by the sweep only": 167,
    "absence has no limit": 173,
    "what is cancelled lets nobody come": 189,
    "uncertain with a callback due forgets since when": 201,
    "a conclusive rejection speaks for earlier keys": 224,
    "a group goes on behind what failed": 248,
    "a late failure is taken": 386,
    "what is paused grows older": 395,
    "permits are free before their lease ends": 440,
    "send again does not wait for earlier senders": 461,
    "doubt begins when a person resumes": 691,
    "what is absent does not wait for those that were let by": 854,
    "a look counts at once": 871,
}
"""Where the search for a bug begins. It goes on from 0 where a change of the simulation has made another run of that seed."""
