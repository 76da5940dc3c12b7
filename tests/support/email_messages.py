"""An e-mail's payload, and the message that it becomes."""

import base64
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

from hypothesis import strategies as st

from dispatchers.adapters.email.message import Address, Message, compose

DATE = datetime(2026, 11, 21, 9, 30, tzinfo=UTC)
KEY = "ck1_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX"
SHOP = Address("Shop", "shop@example.com")
MAIL = {"to": "ada@example.com", "subject": "Your invoice", "text": "Dear Ada\n"}
PDF = {
    "filename": "invoice.pdf",
    "content_type": "application/pdf",
    "base64": base64.b64encode(b"%PDF\r\n\0\xff").decode(),
}


def made(payload: Any = MAIL, **settings: Any) -> Message:
    return compose(payload, **{"sender": SHOP, "key": KEY, "date": DATE, **settings})


def parsed(payload: Any = MAIL, **settings: Any) -> EmailMessage:
    message = message_from_bytes(made(payload, **settings).content, policy=default)
    assert isinstance(message, EmailMessage)
    assert not message.defects
    return message


words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"]), max_size=200)
# What a reader may decode into a header of its own: a line break, and "Bcc: eve@example.com".
encoded_words = st.sampled_from(["=?utf-8?b?DQpCY2M6IGV2ZUBleGFtcGxlLmNvbQ==?=", "=?utf-8?q?=0D=0ABcc:_eve?=", "=?x"])
