"""What an optional part says where its package is not installed: which extra brings it."""


def missing(part: str, extra: str, error: ModuleNotFoundError) -> ImportError:
    """The error of `part`, a module or a class, for the package that `error` did not find."""
    package = (error.name or "").partition(".")[0]
    return ImportError(
        f"{part} needs the package {package!r}: pip install 'sqlalchemy-outbox[{extra}]'", name=error.name
    )
