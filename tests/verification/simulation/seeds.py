"""How many seeds the suite plays, and by which of them it finds what few find: the rest is for `dev.py simulate`."""

SEEDS_IN_CI = 500
"""As many as each of the bugs is found in: an invariant that is broken as easily as that is seen in every run."""

SEEDS_TO_FIND = 3000

FOUND_BY = {
    "send again clears doubt": 11,
    "send again forgets when the key was first sent": 11,
    "what is being sent is cancelled": 11,
    "failure_blocks_group=False of an adapter is ignored": 11,
    "a rejection clears doubt": 12,
    "what may have been sent is cancelled": 12,
    "what is absent does not wait for those that were let by": 12,
    "every claim bears the same token": 13,
    "the lease is measured from the claim's answer": 13,
    "the fence is gone": 13,
    "the pin changes after a possible send": 14,
    "a failed entry does not block its group": 17,
    "a release makes no next entry due": 17,
    "what is uncertain is waited for even after a release": 17,
    "a pause is heeded only by who has heard of it": 22,
    "every rejection is taken for conclusive": 24,
    "what is known is not put on record when a callback fails": 26,
    "in progress leaves no doubt": 27,
    "in progress is taken for success": 27,
    "a block keeps no entry waiting": 27,
    "what is delivered after all leaves its group blocked": 27,
    "a claim does not take its permits": 34,
    "deferred clears doubt": 38,
    "age has no limit": 38,
    "a retry-after is honoured beyond the age": 38,
    "CannotTell counts as proof of absence": 41,
    "who is followed by a locked one leaves all the same": 44,
    "another timeline is noticed by the sweep only": 57,
    "what was sent before a restore is cancelled": 57,
    "resuming doubts nothing": 57,
    "doubt begins when an operator resumes": 78,
    "uncertain with a callback due forgets since when": 85,
    "a cancellation makes no next entry due": 92,
    "a key conflict is taken for failure": 96,
    "a conclusive rejection speaks for earlier keys": 96,
    "absence under the present key counts for all keys": 96,
    "a status lookup needs no fencing delay": 98,
    "the permits that others have taken are not counted": 102,
    "permits are free before their lease ends": 102,
    "a late failure is taken": 137,
    "absence has no limit": 173,
    "send again does not wait for earlier senders": 261,
    "what is paused grows older": 344,
    "a head that is being taken out is waited for like any other": 1133,
}
"""Where the search for a mutant begins. It continues from 0 if a change has made another run of that seed.

Written by `python3 dev.py simulate --mutants --jobs 2`.
"""
