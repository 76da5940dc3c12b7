"""`outbox keys`: generate secrets, derive keys, forget a recorded secret."""

import base64
import os
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from dispatchers.cli import options
from dispatchers.cli.data_keys import data_keys
from dispatchers.cli.exit_codes import NothingFound
from dispatchers.cli.output import answer, clean
from dispatchers.cli.over_databases import one_database

if TYPE_CHECKING:
    from dispatchers.maintenance.reencryption import Kind, Page
    from outbox.encryption import Encryption
    from outbox.keys import Keyring

SECRET_FORM = "write kid:base64, several separated by commas, each secret at least 32 bytes long"
MAX_EPOCH = 32767  # the column's: a smallint


@click.group()
def keys() -> None:
    """Generate secrets and derive keys."""


@keys.command()
@click.option("--kid", help="Id of the new secret; use a new id at each rotation. By default k1, or d1 with --data.")
@click.option("--data", is_flag=True, help="Generate a data key for OUTBOX_DATA_KEYS, which encrypts payloads.")
@options.json_option
def generate(kid: str | None, data: bool) -> None:
    """Generate a secret for OUTBOX_SECRET. To rotate, put the new secret before the old one."""
    from outbox.keys import SECRET_BYTES_MIN, Keyring

    secret = secrets.token_bytes(SECRET_BYTES_MIN)
    kid = kid or ("d1" if data else "k1")
    Keyring({kid: secret})
    text = f"{kid}:{base64.b64encode(secret).decode()}"
    answer({"kid": kid, "secret": text}, text)


@keys.command("list")
@one_database
def list_keys(target: options.Target) -> None:
    """Count how many stored values each data key encrypts.

    Reads every entry, result and answer, page by page.
    """
    from dispatchers.cli.connections import examining
    from dispatchers.maintenance.reencryption import KINDS, pages, read_page

    counts: dict[str, Counter[str]] = {}
    with examining(target) as (connection, tables):

        def read(kind: "Kind", after: UUID | None) -> "Page":
            with connection.begin():
                return read_page(connection, tables, kind, after)

        for kind, page in pages(read):
            for key_id, count in page.found.items():
                counts.setdefault(key_id, Counter())[kind] += count
    encryption = data_keys()
    listed = [
        {"key": key_id or None, **{kind: found[kind] for kind in KINDS}, "known": _is_known(encryption, key_id)}
        for key_id, found in sorted(counts.items())
    ]
    answer({"keys": listed}, "\n".join(map(_counted, listed)) or "nothing is stored")


def _is_known(encryption: "Encryption | None", key_id: str) -> bool | None:
    """Whether this process has the key; None for values that are not encrypted."""
    return (encryption is not None and key_id in encryption) if key_id else None


def _counted(row: dict[str, Any]) -> str:
    name = "not encrypted" if row["key"] is None else f"key {clean(row['key'])}"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in row.items() if kind not in ("key", "known"))
    return f"{name}: {counts}" + ("; this process does not have it" if row["known"] is False else "")


@keys.command()
@click.option("--plain", is_flag=True, help="Encrypt also what is not encrypted yet.")
@one_database
def reencrypt(plain: bool, target: options.Target) -> None:
    """Encrypt all stored values with the first key of OUTBOX_DATA_KEYS.

    Works page by page while apps and dispatchers run, and needs the rights of the tables' owner. You can stop it at any time, and
    repeat it: it leaves alone what has the first key. At the end it shows which keys are no longer needed.
    """
    from dispatchers.cli.connections import examining, repeated_after_conflicts
    from dispatchers.maintenance.reencryption import encrypt_page, pages

    encryption = data_keys()
    if encryption is None or not encryption.encrypts:
        raise click.UsageError("there is no data key to encrypt with: set OUTBOX_DATA_KEYS, or OUTBOX_ENCRYPTION")
    again, left, failed = Counter[str](), Counter[str](), list[dict[str, Any]]()
    with examining(target) as (connection, tables):

        @repeated_after_conflicts
        def change(kind: "Kind", after: UUID | None) -> "Page":
            with connection.begin():
                return encrypt_page(connection, tables, kind, after, encryption, with_plain=plain)

        for kind, page in pages(change):
            again[kind] += page.again
            failed += [{"kind": kind, "id": id, "reason": why} for id, why in page.failed.items()]
            left.update(page.failed.values())
            click.echo(f"{kind}: {again[kind]:,} encrypted again", err=True)
    document = {"key": encryption.current, "again": dict(again), "failed": failed}
    lines = [f"{again.total():,} values are encrypted again with key {encryption.current}"]
    lines += [f"{count:,} are left: {clean(why)}" for why, count in left.items()]
    if not failed:
        lines.append(f"when every process encrypts with {encryption.current}, repeat this, and remove the other keys")
    answer(document, "\n".join(lines))
    if failed:
        raise click.ClickException(
            f"{len(failed):,} values cannot be decrypted: keep every key, and see docs/encryption.md"
        )


@keys.command()
@click.argument("kid")
@one_database
def forget(kid: str, target: options.Target) -> None:
    """Delete the recorded check value of KID.

    The database stores a check value of each kid's secret, and of each data key under data:ID, and a process with another one
    refuses to start. Use this command if a wrong one was recorded: the next dispatcher that starts then records the check
    value of its own. To rotate, use a new kid instead.
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
