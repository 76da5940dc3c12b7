"""The migration scripts, and a use of Alembic that never touches its module-wide proxies."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from outbox.errors import SchemaError
from outbox.sql.schema.identifiers import check_table_names

if TYPE_CHECKING:  # imported at run time, it would ask for a package that only an extra brings
    from alembic.runtime.migration import MigrationContext, RevisionStep
    from alembic.script import ScriptDirectory


def head() -> str:
    """The revision that this release needs: the last of the migrations, which are numbered."""
    return max(path.name.partition("_")[0] for path in (home() / "versions").glob("[0-9]*.py"))


def configured(
    schema: str | None,
    prefix: str,
    *,
    connection: Connection | None = None,
    dialect_name: str | None = None,
    dialect_opts: dict[str, str] | None = None,
    **options: Any,
) -> "MigrationContext":
    """Alembic's context for these tables, without an `env.py`."""
    from alembic.runtime.migration import MigrationContext

    import outbox.migrations.portable  # noqa: F401  # Alembic finds its class by the dialect's name

    check_table_names(schema, prefix)
    options |= {"version_table": f"{prefix}version", "version_table_schema": schema}
    return MigrationContext.configure(connection, dialect_name=dialect_name, dialect_opts=dialect_opts, opts=options)


def run(context: "MigrationContext", schema: str | None, prefix: str) -> None:
    """Run what the context was configured to run; `op`, the schema and the prefix are handed to the scripts."""
    from alembic.operations import Operations

    context.run_migrations(op=Operations(context), schema=schema, prefix=prefix)


def open_scripts() -> "ScriptDirectory":
    """Raises SchemaError, naming the extra, where Alembic is not installed."""
    try:
        from alembic.script import ScriptDirectory
    except ModuleNotFoundError as error:
        raise without_alembic() from error
    return ScriptDirectory(str(home()))


def upgrading(scripts: "ScriptDirectory", at: Any) -> "list[RevisionStep]":
    """The steps to the newest revision. at: the revisions that the database is at, as Alembic gives them."""
    from alembic.runtime.migration import MigrationStep

    following = reversed([*scripts.iterate_revisions("head", at, implicit_base=True)])
    return [MigrationStep.upgrade_from_script(scripts.revision_map, script) for script in following]


def downgrading(scripts: "ScriptDirectory", at: Any, revision: str) -> "list[RevisionStep]":
    """The steps back to `revision`. at: as for `upgrading`."""
    from alembic.runtime.migration import MigrationStep

    undone = scripts.iterate_revisions(at, revision, select_for_downgrade=True)
    return [MigrationStep.downgrade_from_script(scripts.revision_map, script) for script in undone]


def without_alembic() -> SchemaError:
    return SchemaError("migrations need Alembic: pip install 'sqlalchemy-outbox[migrations]'")


def home() -> Path:
    """Where the migrations are: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "_migrations", package.parent / "alembic"):
        if (folder / "versions").is_dir():  # in site-packages `../alembic` is Alembic itself, which has none
            return folder
    raise SchemaError(f"the migrations are not next to {package}: reinstall sqlalchemy-outbox")
