"""The command `outbox`: run the dispatcher, keep its tables, look at entries and decide about them.

What a command needs is imported when it is called, so that help and completion answer at once: here a name stands for a
`module:attribute`, and in a command's module only click is imported at the top.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dispatchers.cli import exit_codes

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Command(NamedTuple):
    """Where a command is found, and its line in the help."""

    home: str
    help: str


COMMANDS: dict[str, dict[str, Command]] = {
    "Run": {
        "run": Command("run:run", "Run the dispatcher that MODULE:FUNCTION makes."),
        "maintenance": Command("maintenance:maintenance", "Delete what is settled and need not be kept."),
    },
    "Look": {
        "status": Command("entries:status", "How the outbox is, or what became of one parent."),
        "list": Command("entries:list_entries", "List entries by state, destination, operation or parent."),
        "show": Command("entries:show", "Show all that is known of one entry."),
        "verify": Command("verify:verify", "Check the stored history against the promises."),
        "destinations": Command("destinations:destinations", "How each destination is, and what weighs on it."),
    },
    "Decide": {
        "retry": Command("decisions:retry", "Make a waiting entry due now."),
        "cancel": Command("decisions:cancel", "Withdraw an entry that was never possibly sent."),
        "resolve": Command("decisions:resolve", "Say what became of an uncertain entry."),
        "release": Command("decisions:release", "Let a held entry or a halted lane go on."),
        "pause": Command("destinations:pause", "Send nothing more to a destination."),
        "resume": Command("resume:resume", "Let a destination go on, or after a restore all."),
    },
    "Set up": {
        "db": Command("db:db", "The outbox's tables."),
        "callbacks": Command("callbacks:callbacks", "The callbacks on record, without which nothing settles."),
        "keys": Command("keys:keys", "The key ring, and the keys derived from it."),
        "docs": Command("docs:docs", "What an API publishes, written from its settings."),
        "config": Command("config:config", "Show what is in force, and where it comes from."),
        "completion": Command("completion:completion", "Print a script that completes commands in SHELL."),
    },
}
"""Every command, by the section of the help that it stands in."""


class Commands(click.Group):
    """A group that imports a command when it is called, and shows the errors that users can mend without a trace."""

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
        ctx.fail(f"there is no command {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))

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
        # From the words themselves: who asks for JSON is answered in JSON, also when the rest cannot be understood.
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
    """Commit the intent with the data, and let every retry carry the same key."""
