"""The command `outbox`: run the dispatcher, manage its tables, inspect entries and record operator decisions.

A command's imports run when the command is called, so that help and completion are fast: here a command is named by its
`module:attribute`, and a command's module imports only click at the top.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dispatchers.cli import exit_codes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Command(NamedTuple):
    """The `module:attribute` of a command, and its line in the help."""

    home: str
    help: str


COMMANDS: dict[str, dict[str, Command]] = {
    "Run": {
        "run": Command("run:run", "Run the dispatcher, or the fleet, that MODULE:FUNCTION makes."),
        "web": Command("web:web", "Serve the dashboard: a page and a JSON API for operators."),
        "maintenance": Command("maintenance:maintenance", "Delete settled entries and records past their retention."),
    },
    "Inspect": {
        "status": Command("entries:status", "Show queue health, or the status of one parent key."),
        "list": Command("entries:list_entries", "List entries by state, destination, operation or parent."),
        "show": Command("entries:show", "Show one entry in full: fields, state and history."),
        "verify": Command("verify:verify", "Check the stored history against the invariants."),
        "doctor": Command("doctor:doctor", "Find faults of the setup, and name a remedy for each."),
        "audit": Command("audit:audit", "List the decisions of operators, the newest first."),
        "schedules": Command("schedules:schedules", "Manage the schedules of periodic effects."),
        "destinations": Command("destinations:destinations", "Show each destination's backlog and throttling."),
    },
    "Decide": {
        "retry": Command("decisions:retry", "Make waiting entries due now."),
        "cancel": Command("decisions:cancel", "Cancel entries that have not been sent."),
        "resolve": Command("decisions:resolve", "Record the outcome of uncertain entries."),
        "lookup": Command("uncertain:lookup", "Look an uncertain entry up at the service again."),
        "resend": Command("uncertain:resend", "Send an uncertain entry again, if that is safe now."),
        "release": Command("decisions:release", "Release suspended entries or a blocked group."),
        "again": Command("decisions:again", "Enqueue failed or cancelled entries once more."),
        "confirm": Command("proposals:confirm", "Confirm a decision that another operator proposed."),
        "pause": Command("destinations:pause", "Stop sending to a destination."),
        "resume": Command("resume:resume", "Resume a destination, or all after a restore."),
    },
    "Set up": {
        "db": Command("db:db", "Create, upgrade and check the outbox's tables."),
        "callbacks": Command("callbacks:callbacks", "Manage the recorded callbacks."),
        "user": Command("user:user", "Print a line for the file of users of `outbox web`."),
        "keys": Command("keys:keys", "Generate secrets and derive keys."),
        "config": Command("config:config", "Show the effective configuration and its sources."),
        "completion": Command("completion:completion", "Print a completion script for SHELL."),
    },
}
"""Every command, by its section in the help."""


class Commands(click.Group):
    """A group that imports a command when it is called, and shows errors that a user can fix without a traceback."""

    def __init__(self, sections: Mapping[str, Mapping[str, Command]], **settings: Any) -> None:
        super().__init__(**settings)
        self._sections = sections
        self._all = {name: command for section in sections.values() for name, command in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._all)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._all:
            return None
        module, _, attribute = self._all[cmd_name].home.partition(":")
        command: click.Command = getattr(import_module(f"{__name__}.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._all and not args[0].startswith("-"):
            self._refuse(ctx, args[0])
        return super().resolve_command(ctx, args)

    def _refuse(self, ctx: click.Context, name: str) -> None:
        from difflib import get_close_matches

        close = get_close_matches(name, self._all, n=1)
        ctx.fail(f"unknown command {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self._all))
        for title, section in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), command.help) for name, command in section.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[Any]]":
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=self._all[name].help) for name in self._all if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Read before parsing: with --json an error is JSON too, also when the other arguments are invalid.
        ctx.meta[exit_codes.JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            failure = exit_codes.failure_of(error)
            if failure is None or (isinstance(error, click.UsageError) and not ctx.meta[exit_codes.JSON]):
                raise  # click shows it with the command's usage
            click.echo(failure.text(as_json=ctx.meta[exit_codes.JSON]), err=True)
            ctx.exit(failure.status)


@click.command(
    cls=Commands, sections=COMMANDS, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(
    package_name="sqlalchemy-outbox", prog_name="outbox", message="%(prog)s (%(package)s) %(version)s"
)
def main() -> None:
    """Run and operate a transactional outbox."""
