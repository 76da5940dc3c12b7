"""`outbox keys`: generate secrets, derive keys, forget a recorded secret."""

import base64
import os
import secrets
from typing import TYPE_CHECKING

import click

from dispatchers.cli import options
from dispatchers.cli.exit_codes import NothingFound
from dispatchers.cli.output import answer
from dispatchers.cli.over_databases import one_database

if TYPE_CHECKING:
    from outbox.keys import Keyring

SECRET_FORM = "write kid:base64, several separated by commas, each secret at least 32 bytes long"
MAX_EPOCH = 32767  # the column's: a smallint


@click.group()
def keys() -> None:
    """Generate secrets and derive keys."""


@keys.command()
@click.option("--kid", default="k1", show_default=True, help="Id of the new secret; use a new id at each rotation.")
@options.json_option
def generate(kid: str) -> None:
    """Generate a secret for OUTBOX_SECRET. To rotate, put the new secret before the old one."""
    from outbox.keys import SECRET_BYTES_MIN, Keyring

    secret = secrets.token_bytes(SECRET_BYTES_MIN)
    Keyring({kid: secret})
    text = f"{kid}:{base64.b64encode(secret).decode()}"
    answer({"kid": kid, "secret": text}, text)


@keys.command()
@click.argument("kid")
@one_database
def forget(kid: str, target: options.Target) -> None:
    """Delete the recorded check value of KID.

    The database stores a check value of each kid's secret, and a process with another secret refuses to start. Use this
    command if a wrong secret was recorded: the next dispatcher that starts then records the check value of its own secret. To
    rotate the secret, use a new kid instead.
    """
    from dispatchers.cli.connections import deciding
    from outbox.sql.deployment import forget_secret

    with deciding(target) as (connection, tables):
        if not forget_secret(connection, tables, kid):
            raise NothingFound(f"no secret is recorded for kid {kid!r}")
    answer({"kid": kid}, f"kid {kid}: the next dispatcher that starts records the check value of its secret")


@keys.command()
@options.env_option
@options.scope_option
@options.source_option
@click.option("--parent", required=True, help="Key of the business request.")
@click.option("--operation", required=True, help="E.g. stripe.payment_intents.create.")
@click.option("--discriminator", default="", help="Distinguishes several entries of one operation under one parent.")
@click.option(
    "--epoch",
    type=click.IntRange(0, MAX_EPOCH),
    default=0,
    show_default=True,
    help="Epoch of the key, as `show` prints it.",
)
@click.option("--encoding", type=click.Choice(["native", "uuid", "hex"]), default="native", show_default=True)
@click.option("--kid", help="Id of the secret; by default the ring's current one.")
@click.option("--public", is_flag=True, help="Use the public ring, which has no secret, instead of OUTBOX_SECRET.")
@options.json_option
def derive(
    env: str | None,
    scope: str,
    source: str,
    parent: str,
    operation: str,
    discriminator: str,
    epoch: int,
    encoding: str,
    kid: str | None,
    public: bool,
) -> None:
    """Derive an effect's child key and entry id, as the library does."""
    from outbox.keys import (
        Keyring,
        ParentKey,
        check_field,
        derive_tag,
        encode_hex,
        encode_native,
        encode_uuid,
        entry_id,
        key_fields,
    )

    if not env:
        raise click.UsageError("the deployment's name is part of every key: give --env or set OUTBOX_ENV")
    check_field("env", env)
    secret = os.environ.get("OUTBOX_SECRET")
    if not public and not secret:
        raise click.UsageError("keys are derived from a secret: set OUTBOX_SECRET, or give --public")
    ring = Keyring.public() if public else ring_of(secret or "")
    fields = key_fields(env, ParentKey(parent, scope=scope, source=source), operation, discriminator)
    tag = derive_tag(ring, kid or ring.current, fields, epoch)
    key = {"native": encode_native, "uuid": encode_uuid, "hex": encode_hex}[encoding](tag)
    document = {"child_key": key, "entry_id": entry_id(fields), "kid": kid or ring.current, "epoch": epoch}
    answer(document, f"child key  {key}\nentry id   {entry_id(fields)}")


def ring_of(secret: str) -> "Keyring":
    from outbox.errors import ConfigurationError
    from outbox.keys import Keyring

    try:
        return Keyring.from_text(secret)
    except ConfigurationError:  # its text may contain the secret, if that was written in a kid's place
        raise ConfigurationError(f"OUTBOX_SECRET is malformed: {SECRET_FORM}") from None
