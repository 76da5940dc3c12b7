"""Imports the app's object that `module:name` on the command line names."""

import importlib
import os
import sys
from typing import Any

import click


def load(reference: str, *, what: str, example: str) -> Any:
    """The object that `reference` names; modules of the working directory are found too.

    what: what the command calls the second half, FUNCTION for example.
    """
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise click.BadParameter(f"{reference!r} is not MODULE:{what}, e.g. {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(f"module {module_name!r} is neither in the working directory nor installed") from error
    if not hasattr(module, name):
        raise click.BadParameter(f"module {module_name!r} has no {what.lower()} {name!r}")
    return getattr(module, name)


def load_function(reference: str, *, example: str) -> Any:
    """The function that `reference` names."""
    found = load(reference, what="FUNCTION", example=example)
    if not callable(found):
        raise click.BadParameter(
            f"{reference!r} must be a function, e.g. {example}, but is of type {type(found).__name__}"
        )
    return found
