"""`outbox resume`: resume one destination, or all sending after a failover, a restore or a copy."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding, repeated_after_conflicts
from dispatchers.cli.output import answer, clean, one_of_several
from dispatchers.cli.over_databases import decision_options, over_databases

if TYPE_CHECKING:
    from dispatchers.admin.decide.resume import Resumed


@click.command()
@click.argument("destination", required=False)
@click.option("--after-restore", is_flag=True, help="The database was failed over, restored or copied.")
@click.option(
    "--nothing-lost",
    is_flag=True,
    help="No commit is missing, as after a planned switchover: unsettled entries keep their state.",
)
@click.option(
    "--since",
    type=options.Since(),
    help="Since when commits may be missing, i.e. when the backup was taken: 15m, 2h or 7d ago, or an instant. By default the"
    " last check of the database's identity.",
)
@click.option(
    "--adopt-from",
    metavar="ENV",
    help="The env that the database belonged to until now. For a copy, or a renamed deployment: it then belongs to --env.",
)
@options.env_option
@decision_options(over_databases)
def resume(
    destination: str | None,
    after_restore: bool,
    nothing_lost: bool,
    since: datetime | timedelta | None,
    adopt_from: str | None,
    env: str | None,
    actor: str,
    reason: str,
    target: options.Target,
) -> None:
    """Resume a destination, or all after a restore.

    With DESTINATION: ends its pause and Retry-After cooldown and closes its circuit breaker, at once.

    With --after-restore and a reason: resumes sending after the database was failed over, restored or copied. Unsettled
    entries then count as maybe sent: an entry is sent again under the same key while its service certainly remembers that
    key, and becomes uncertain otherwise. Use it also if no dispatcher has noticed the restore.

    A database of another env is refused. For a copy, or a renamed deployment, name the env that it belonged to with
    --adopt-from; the unsettled entries of that env are then suspended.
    """
    if (destination is None) != after_restore:
        raise click.UsageError("give either a DESTINATION or --after-restore")
    if destination is not None:
        if nothing_lost or since is not None or adopt_from is not None:
            raise click.UsageError("--nothing-lost, --since and --adopt-from need --after-restore")
        _resume_destination(destination, actor, reason, target)
        return
    if one_of_several():
        raise click.UsageError("--after-restore is about one database: give --database")
    if nothing_lost and since is not None:
        raise click.UsageError(
            "--since says that commits may be missing, and --nothing-lost that none are: give only one"
        )
    if not env:
        raise click.UsageError("the database's env is unknown: give --env or set OUTBOX_ENV")
    _resume_all(
        target, env=env, actor=actor, reason=reason, since=since, nothing_lost=nothing_lost, adopt_from=adopt_from
    )


def _resume_destination(destination: str, actor: str, reason: str, target: options.Target) -> None:
    from dispatchers.admin.decide import decisions

    with deciding(target) as (connection, tables):
        decisions.resume(connection, tables, destination, actor=actor, reason=reason)
    answer(
        {"destination": destination, "decision": "resume", "actor": actor}, f"destination {clean(destination)} resumed"
    )


def _resume_all(target: options.Target, **decided: Any) -> None:
    from dispatchers.admin.decide import resume as admin_resume

    with deciding(target) as (connection, tables):
        engine = connection.engine
    decision = admin_resume.OperatorDecision(**decided)
    resumed = admin_resume.resume(engine, tables, decision, repeated_after_conflicts)
    answer(resumed, "\n".join(_lines(resumed)))


def _lines(resumed: "Resumed") -> list[str]:
    lines = ["sending is resumed"]
    if resumed.since is not None:
        lines.append(f"{resumed.doubted} more entries count as maybe sent, after {resumed.since:%Y-%m-%d %H:%M:%S UTC}")
    if resumed.suspended:
        lines.append(
            f"{resumed.suspended} entries of another deployment are suspended: `outbox list --suspended` shows them"
        )
    return lines
