"""The whole sending side on a virtual clock, its faults drawn from a seed: the same seed, the same run, step by step.

The dispatcher is the real one. What it is handed is simulated: a database (`reference`, reached through `database`),
services (`services`), processes that die and freeze (`world`), an app (`app`) and people (`people`). `scenario` puts it together,
`invariants` watches, `run` plays it, `guards` shows that it can fail.
"""
