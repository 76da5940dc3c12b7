"""`outbox completion`: a script for the shell, which asks `outbox` itself what may follow."""

import click

from dispatchers.cli import options
from dispatchers.cli.output import answer


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@options.json_option
def completion(shell: str) -> None:
    """Print a script that completes commands in SHELL.

    In bash: eval "$(outbox completion bash)". The same in ~/.bashrc or ~/.zshrc lasts; for fish save it as
    ~/.config/fish/completions/outbox.fish.
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None
    script = found(root, {}, "outbox", "_OUTBOX_COMPLETE").source()
    answer({"shell": shell, "script": script}, script)
