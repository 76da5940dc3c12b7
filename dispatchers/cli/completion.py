"""`outbox completion`: a completion script for the shell; it asks `outbox` itself for the candidates."""

import click

from dispatchers.cli import options
from dispatchers.cli.output import answer


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@options.json_option
def completion(shell: str) -> None:
    """Print a completion script for SHELL.

    In bash, run eval "$(outbox completion bash)"; to keep it, add that line to ~/.bashrc, or ~/.zshrc for zsh. For fish, save
    the script as ~/.config/fish/completions/outbox.fish.
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click has no completion for {shell}")
    script = found(root, {}, "outbox", "_OUTBOX_COMPLETE").source()
    answer({"shell": shell, "script": script}, script)
