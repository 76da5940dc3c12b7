"""The errors of an optional part whose package is not installed, or is installed in a version that does not fit."""

from importlib import metadata
from importlib.util import find_spec


def missing(part: str, extra: str, error: ModuleNotFoundError) -> ImportError:
    """The error of `part`, a module or a class, for the package or the module of a package that `error` did not find."""
    name = error.name or ""
    package = name.partition(".")[0]
    found = version_of(package) if name != package and find_spec(package) else None
    what = (
        f"the package {package!r}" if found is None else f"the module {name!r}, which {package} {found} does not have"
    )
    return ImportError(f"{part} needs {what}: pip install 'sqlalchemy-outbox[{extra}]'", name=error.name)


def require_before(part: str, extra: str, package: str, major: int) -> None:
    """Raise `ImportError` if the installed package has this major version, or a later one. `part` would fail in the middle."""
    found = version_of(package)
    if found is not None and int(found.partition(".")[0]) >= major:
        raise ImportError(
            f"{part} does not work with {package} {found}, only with versions before {major}:"
            f" pip install 'sqlalchemy-outbox[{extra}]'",
            name=package,
        )


def version_of(package: str) -> str | None:
    """The installed version. None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
