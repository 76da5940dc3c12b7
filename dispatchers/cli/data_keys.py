"""The data keys of a command: from OUTBOX_DATA_KEYS, or from the app's object that OUTBOX_ENCRYPTION names."""

import os
from typing import TYPE_CHECKING

from dispatchers.cli.references import load

if TYPE_CHECKING:
    from outbox.encryption import Encryption


def data_keys() -> "Encryption | None":
    """The keys; None if neither variable is set. OUTBOX_ENCRYPTION is MODULE:NAME of an `outbox.Encryption`, for key services."""
    from outbox.configuration import encryption_from_environment
    from outbox.encryption import encryption_of

    reference = os.environ.get("OUTBOX_ENCRYPTION")
    if reference:
        return encryption_of(load(reference, what="NAME", example="OUTBOX_ENCRYPTION=shop.keys:encryption"))
    return encryption_from_environment()
