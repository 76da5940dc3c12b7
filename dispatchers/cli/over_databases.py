"""`--databases FILE`: a command that only reads, over all databases of a fleet."""

import asyncio
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dispatchers.cli import options, output
from dispatchers.cli.exit_codes import NOT_FOUND, REFUSED, Failure, NothingFound, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from sqlalchemy import URL

DATABASE_SECONDS = 20.0  # a database that has not answered by then is reported as an error


class Answer(NamedTuple):
    """What the command said of one database. status: its exit code. failure: why it said nothing."""

    name: str
    parts: list[output.Part]
    status: int = 0
    failure: Failure | None = None


def over_databases(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--databases`, beside the options of `options.database_options`. With it the command runs once for each database."""

    @wraps(command)
    def with_each(*, databases: str | None, database: str | None, schema: str | None, prefix: str, **rest: Any) -> None:
        context = click.get_current_context()
        if are_all_meant(context, databases, database):
            _run_over(context, str(databases), lambda url: command(target=options.Target(url, schema, prefix), **rest))
        else:
            command(target=options.Target(str(database), schema, prefix), **rest)

    return options.target_options(databases_option(with_each), database_required=False)


databases_option = click.option(
    "--databases",
    metavar="FILE",
    envvar="OUTBOX_DATABASES",
    show_envvar=True,
    help="All databases of a fleet: a file with lines `name = url`.",
)


def are_all_meant(context: click.Context, databases: str | None, database: str | None) -> bool:
    """Whether `--databases` counts, and not `--database`: one that was typed counts more than a variable."""
    given = {name: context.get_parameter_source(name) for name in ("databases", "database")}
    typed = [name for name, source in given.items() if source is click.core.ParameterSource.COMMANDLINE]
    if len(typed) == 2:
        raise click.UsageError("give either --database or --databases")
    if databases is None and database is None:
        (missing,) = (param for param in context.command.params if param.name == "database")
        raise click.MissingParameter(ctx=context, param=missing)
    return databases is not None and typed != ["database"]


def _run_over(context: click.Context, path: str, work: Callable[[str], Any]) -> None:
    from dispatchers.process.databases_file import read_databases

    databases = read_databases(path)
    answers = asyncio.run(_ask_all(context, databases, work))
    found = [each for each in answers if each.failure is None or each.failure.status != NOT_FOUND]
    if not found:
        raise NothingFound(
            f"in none of {len(answers)} databases: {answers[0].failure.message if answers[0].failure else ''}"
        )
    documents = {each.name: _document(each) for each in found}
    output.answer({"databases": documents}, lambda: _drawn(found))
    statuses = {each.failure.status if each.failure else each.status for each in found} - {0}
    if statuses:
        context.exit(REFUSED if any(each.failure for each in found) else max(statuses))


async def _ask_all(context: click.Context, databases: "dict[str, URL]", work: Callable[[str], Any]) -> list[Answer]:
    """Ask all at once, each on a thread of its own: one that hangs delays the answer, and does not prevent it."""
    from dispatchers.threads import on_own_thread

    async def ask(name: str, url: "URL") -> Answer:
        shown = url.render_as_string(hide_password=False)
        try:
            async with asyncio.timeout(DATABASE_SECONDS):
                answer: Answer = await on_own_thread("outbox-database", _ask, context, name, lambda: work(shown))
                return answer
        except TimeoutError:
            text = f"the database has not answered for {DATABASE_SECONDS:g} s"
            return Answer(name, [], failure=Failure(REFUSED, "database", text))

    return await asyncio.gather(*(ask(name, url) for name, url in databases.items()))


def _ask(context: click.Context, name: str, work: Callable[[], Any]) -> Answer:
    with context.scope(cleanup=False), output.collecting() as parts:
        try:
            work()
        except click.exceptions.Exit as ended:
            return Answer(name, parts, status=ended.exit_code)
        except Exception as error:
            failure = failure_of(error)
            if failure is None or isinstance(error, click.UsageError):
                raise
            return Answer(name, parts, failure=failure)
    return Answer(name, parts)


def _document(answer: Answer) -> Any:
    if answer.failure is not None:
        return {"error": {"code": answer.failure.code, "message": answer.failure.message}}
    return answer.parts[0].document


def _drawn(answers: Iterable[Answer]) -> "Iterator[RenderableType]":
    for number, answer in enumerate(answers):
        if number:
            yield output.prose("")
        yield output.prose(f"{answer.name}:", "bold")
        if answer.failure is not None:
            yield output.prose(answer.failure.message, "bold red")
        for part in answer.parts:
            yield from part.drawn
