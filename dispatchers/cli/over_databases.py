"""`--databases FILE`: a command over all databases of a fleet, or over the one that has what it names."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dispatchers.admin.read.plain_values import plain
from dispatchers.cli import options, output
from dispatchers.cli.connections import WrongUrl, reach, repeated_after_conflicts
from dispatchers.cli.exit_codes import NOT_FOUND, REFUSED, Failure, NothingFound, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from sqlalchemy import URL

Step = tuple[Callable[[str], Any], float | None]
"""The work with the URL of a database, and its limit in seconds."""

DATABASE_SECONDS = 20.0  # a database that has not answered by then is reported as an error
FIND_SECONDS = 5.0  # the same for the search for the database of an entry


class Answer(NamedTuple):
    """The command's output for one database. status: its exit code. failure: why there is no output."""

    name: str
    parts: list[output.Part]
    status: int = 0
    failure: Failure | None = None


def over_databases(command: Callable[..., Any], *, is_long: bool = False) -> Callable[..., Any]:
    """Add `--databases` to the options of a target. With it the command runs once for each database. A conflict repeats it.

    is_long: whether a database that answers may take longer than `DATABASE_SECONDS`.
    """
    repeated = repeated_after_conflicts(command)

    @wraps(command)
    def with_each(*, databases: str | None, database: str | None, schema: str | None, prefix: str, **rest: Any) -> None:
        context = click.get_current_context()
        url = url_of_one(context, databases, database)

        def work(url: str) -> None:
            repeated(target=options.Target(url, schema, prefix), **rest)

        if url is None:
            _run_over(
                context,
                str(databases),
                [(reach, DATABASE_SECONDS), (work, None)] if is_long else [(work, DATABASE_SECONDS)],
            )
        else:
            work(url)

    return options.target_options(databases_option(with_each))


def one_database(command: Callable[..., Any], *, found_by: str | None = None) -> Callable[..., Any]:
    """Add `--databases`, as `over_databases`. With it the command runs in the database that `--database NAME` names.

    found_by: the argument that names an entry. Without `--database` the command then runs where this entry is.
    """
    repeated = repeated_after_conflicts(command)

    @wraps(command)
    def with_one(*, databases: str | None, database: str | None, schema: str | None, prefix: str, **rest: Any) -> None:
        context = click.get_current_context()
        url = url_of_one(context, databases, database)
        if url is None:
            named = None if found_by is None else rest[found_by]
            url = _url_of_holder(context, str(databases), named, options.Target("", schema, prefix))
        repeated(target=options.Target(url, schema, prefix), **rest)

    return options.target_options(databases_option(with_one))


of_entry = partial(one_database, found_by="id")
"""Decorates a command whose argument ID is that of an entry."""


def decision_options(
    on: Callable[[Callable[..., Any]], Callable[..., Any]] = of_entry, *, reason_required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--actor` and `--reason`, and the options of the database. on: which adds these. reason_required: False for a command
    that only sometimes decides.
    """
    actor = click.option(
        "--actor", callback=options.actor_name, help="Name of the operator; by default the system's user."
    )
    reason = click.option("--reason", required=reason_required, help="Reason; it is recorded with the decision.")

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        return actor(reason(on(command)))

    return decorate


databases_option = click.option(
    "--databases",
    metavar="FILE",
    envvar="OUTBOX_DATABASES",
    show_envvar=True,
    help="Databases of a fleet: a file with lines `name = url`. With it, --database may be a name of the file.",
)


def url_of_one(context: click.Context, databases: str | None, database: str | None) -> str | None:
    """The URL of the database that `--database` gives, or names in the file; None if only the file is given.

    What was typed counts more than a variable, and the file's variable more than that of one database.
    """
    if databases is None:
        if database is None:
            (missing,) = (param for param in context.command.params if param.name == "database")
            raise click.MissingParameter(ctx=context, param=missing)
        return database
    if database is None or not _is_typed(context, "database"):
        return None
    if "://" not in database:
        return _url_of_name(databases, database)
    if _is_typed(context, "databases"):
        raise click.UsageError("with --databases, --database must be a name in the file, and not a URL")
    return database


def _is_typed(context: click.Context, option: str) -> bool:
    return context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE


def _url_of_name(path: str, name: str) -> str:
    from dispatchers.process.databases_file import read_databases

    databases = read_databases(path)
    if name not in databases:  # it is not shown: it may be a part of a URL
        raise click.UsageError(f"--database is not a name in {path}, which names {', '.join(databases)}")
    return databases[name].render_as_string(hide_password=False)


def _url_of_holder(context: click.Context, path: str, named: str | None, target: options.Target) -> str:
    """The URL of the only database that has the entry. target: its tables."""
    from dispatchers.cli.named_entries import is_whole_id
    from dispatchers.process.databases_file import read_databases

    databases = read_databases(path)
    if named is None:
        raise click.UsageError(f"give --database NAME, one of {', '.join(databases)}")
    answers = asyncio.run(
        _ask_all(context, databases, [(lambda url: _require_entry(named, target._replace(database=url)), FIND_SECONDS)])
    )
    found = [each.name for each in answers if each.failure is None]
    failures = [(each.name, each.failure) for each in answers if each.failure is not None]
    silent = [f"{name}: {failure.message}" for name, failure in failures if failure.status != NOT_FOUND]
    if len(found) > 1:
        raise click.UsageError(f"{named!r} is in several databases: give --database NAME, one of {', '.join(found)}")
    if found and (not silent or is_whole_id(named)):
        return databases[found[0]].render_as_string(hide_password=False)
    if found:  # what is not a whole id may name another entry there
        raise click.ClickException(
            f"{named!r} is in {found[0]}: give --database {found[0]}, because {'; '.join(silent)}"
        )
    if silent:
        raise click.ClickException(f"{named!r} is in no database that answered; {'; '.join(silent)}")
    raise NothingFound(f"in none of {len(answers)} databases: {failures[0][1].message}")


def _require_entry(named: str, target: options.Target) -> None:
    from dispatchers.cli.connections import reading
    from dispatchers.cli.named_entries import require_found

    with reading(target) as (connection, tables):
        require_found(connection, tables, named)


def _run_over(context: click.Context, path: str, steps: Sequence[Step]) -> None:
    from dispatchers.process.databases_file import read_databases

    databases = read_databases(path)
    answers = asyncio.run(_ask_all(context, databases, steps))
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


async def _ask_all(context: click.Context, databases: "dict[str, URL]", steps: Sequence[Step]) -> list[Answer]:
    """Ask all at the same time, each on its own thread: one that hangs delays the answer, and does not prevent it."""
    from dispatchers.threads import on_own_thread

    async def ask(name: str, url: "URL") -> Answer:
        shown = url.render_as_string(hide_password=False)
        answer = Answer(name, [])
        for work, seconds in steps:
            try:
                async with asyncio.timeout(seconds):
                    answer = await on_own_thread("outbox-database", _ask, context, name, partial(work, shown))
            except TimeoutError:
                text = f"the database has not answered for {seconds:g} s"
                answer = Answer(name, [], failure=Failure(REFUSED, "database", text))
            if answer.failure is not None:
                break
        return answer

    return await asyncio.gather(*(ask(name, url) for name, url in databases.items()))


def _ask(context: click.Context, name: str, work: Callable[[], Any]) -> Answer:
    with context.scope(cleanup=False), output.collecting(name) as parts:
        try:
            work()
        except click.exceptions.Exit as ended:
            return Answer(name, parts, status=ended.exit_code)
        except Exception as error:
            failure = failure_of(error)
            if failure is None or (isinstance(error, click.UsageError) and not isinstance(error, WrongUrl)):
                raise
            return Answer(name, parts, failure=failure)
    return Answer(name, parts)


def _document(answer: Answer) -> Any:
    if answer.failure is None:
        return answer.parts[0].document
    done = plain(answer.parts[0].document) if answer.parts else {}
    return {**done, "error": {"code": answer.failure.code, "message": answer.failure.message}}


def _drawn(answers: Iterable[Answer]) -> "Iterator[RenderableType]":
    """A line for each database that says no more, and a paragraph for each other one."""
    from rich.text import Text

    was_line = True
    for number, answer in enumerate(answers):
        drawn = [each for part in answer.parts for each in part.drawn]
        if answer.failure is not None:
            drawn.insert(0, output.prose(answer.failure.message, "bold red"))
        first = drawn[0] if len(drawn) == 1 else None
        line = first if isinstance(first, Text) and "\n" not in first.plain else None
        if number and (line is None or not was_line):
            yield output.prose("")
        name, was_line = output.prose(f"{answer.name}:", "bold"), line is not None
        yield from [name, *drawn] if line is None else [Text(" ").join([name, line])]
