"""`outbox resume`: let a destination go on, or every dispatcher that holds after a failover, a restore or a copy."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from dispatchers.cli import options
from dispatchers.cli.connections import deciding
from dispatchers.cli.decisions import decision_options
from dispatchers.cli.output import answer, clean

if TYPE_CHECKING:
    from dispatchers.admin.resume import OperatorDecision, Resumed


@click.command()
@click.argument("destination", required=False)
@click.option("--after-restore", is_flag=True, help="The database was failed over, restored or copied.")
@click.option(
    "--nothing-lost",
    is_flag=True,
    help="Every commit is there, as after a planned switch to a standby: what is unsettled keeps its state.",
)
@click.option(
    "--since",
    type=options.Since(),
    help="Since when commits may be missing: when the backup was taken, as 15m, 2h, 7d ago or an instant. By default since the"
    " database's last mark.",
)
@click.option(
    "--adopt-from",
    metavar="ENV",
    help="The database belongs to that env, and is --env's from now on: it is a copy, or the deployment has a new name.",
)
@options.env_option
@decision_options()
def resume(
    destination: str | None,
    after_restore: bool,
    nothing_lost: bool,
    since: datetime | timedelta | None,
    adopt_from: str | None,
    env: str | None,
    actor: str,
    reason: str | None,
    database: str,
    schema: str | None,
    prefix: str,
) -> None:
    """Let a destination go on, or after a restore all.

    With DESTINATION, at once: it ends a pause and a cool-down, and closes the circuit breaker.

    With --after-restore, and a reason, every dispatcher goes on that holds since the database was failed over, restored or
    copied. Whatever is unsettled then counts as maybe sent: it goes out again under the same key while its service surely
    remembers that, and is uncertain else. Also where no dispatcher has noticed, if you know better.

    A database of another env is refused. A copy for another deployment, or a deployment's new name, is adopted with
    --adopt-from, which names the env that it belonged to: whose unsettled entries are then suspended.
    """
    if (destination is None) != after_restore:
        raise click.UsageError("say what to resume: a DESTINATION, or all of them --after-restore")
    if destination is not None:
        if nothing_lost or since is not None or adopt_from is not None:
            raise click.UsageError("--nothing-lost, --since and --adopt-from need --after-restore")
        _resume_destination(destination, actor, reason, database, schema, prefix)
        return
    if reason is None:
        raise click.UsageError("Missing option '--reason'.")
    word = _word(nothing_lost=nothing_lost, since=since, adopt_from=adopt_from, env=env, actor=actor, reason=reason)
    _resume_all(word, database, schema, prefix)


def _resume_destination(
    destination: str, actor: str, reason: str | None, database: str, schema: str | None, prefix: str
) -> None:
    from dispatchers.admin import decisions

    with deciding(database, schema, prefix) as (connection, tables):
        decisions.resume(connection, tables, destination, actor=actor, reason=reason)
    answer({"destination": destination, "decision": "resume", "actor": actor}, f"{clean(destination)} goes on")


def _word(*, env: str | None, **said: Any) -> "OperatorDecision":
    from dispatchers.admin.resume import OperatorDecision

    if said["nothing_lost"] and said["since"] is not None:
        raise click.UsageError("--since says since when commits may be missing, and --nothing-lost that none is")
    if not env:
        raise click.UsageError("say whose database this is: give --env or set OUTBOX_ENV")
    return OperatorDecision(env=env, **said)


def _resume_all(word: "OperatorDecision", database: str, schema: str | None, prefix: str) -> None:
    from dispatchers.admin import resume as admin_resume

    with deciding(database, schema, prefix) as (connection, tables):
        engine = connection.engine
    resumed = admin_resume.resume(engine, tables, word)
    answer(resumed, "\n".join(_told(resumed)))


def _told(resumed: "Resumed") -> list[str]:
    told = ["every dispatcher goes on"]
    if resumed.since is not None:
        told.append(f"{resumed.doubted} more entries count as maybe sent, after {resumed.since:%Y-%m-%d %H:%M:%S UTC}")
    if resumed.held_back:
        told.append(f"{resumed.held_back} entries of another deployment are held: `outbox list --held` shows them")
    return told
