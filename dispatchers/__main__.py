"""The command `outbox`, also as `python -m dispatchers`."""

import sys


def main() -> None:
    """Run the command line, or say which extra it comes with."""
    try:
        from dispatchers.cli import main as command
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("outbox: the command line needs the package 'click': pip install 'sqlalchemy-outbox[dispatcher]'")
    command(prog_name="outbox")


if __name__ == "__main__":
    main()
