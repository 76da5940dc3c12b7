"""Makes an e-mail of a payload: its recipients and its bytes. Pure: the same payload, key and date give the same bytes.

    {"to": "Ada <ada@example.com>" or [...], "cc": ..., "bcc": ..., "from": "...", "reply_to": ..., "subject": "...",
     "text": "...", "html": "...", "date": "2026-11-21T09:30:00+00:00", "headers": {"X-Order": "42"},
     "attachments": [{"filename": "invoice.pdf", "content_type": "application/pdf", "base64": "..."}]}

A recipient, a subject, and a text or an html are required.
"""

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.header import Header
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from typing import Any, Final, NamedTuple

FIELDS: Final = frozenset(
    ["to", "cc", "bcc", "from", "reply_to", "subject", "text", "html", "date", "headers", "attachments"]
)
ATTACHMENT_FIELDS: Final = frozenset({"filename", "content_type", "base64"})
MAX_RECIPIENTS: Final = 100  # RFC 5321, 4.5.3.1.8: every server must accept this many
MAX_LOCAL_PART_BYTES: Final = 64  # RFC 5321, 4.5.3.1.1
MAX_ADDRESS_BYTES: Final = 254  # RFC 5321, 4.5.3.1.3: a path of 256 with its angle brackets
MAX_LINE_CHARS: Final = 998  # RFC 5322, 2.1.1
MAX_SHORT_CHARS: Final = 66  # with a parameter's name and quotes, the line has 78 characters: RFC 5322, 2.1.1
OWN_HEADERS: Final = frozenset(
    ["from", "to", "cc", "bcc", "reply-to", "subject", "date", "message-id", "mime-version", "received", "return-path"]
)
# 76: RFC 2045, 6.7 and 6.8. 7 bit, so that no relay has to rewrite it.
MIME: Final = SMTP.clone(max_line_length=76, cte_type="7bit")

ENCODED_WORD: Final = "=?"  # RFC 2047, 2: readers decode such text, even in quotes, and may get a line break from it
JOINERS: Final = "\u200c\u200d"  # Persian and Indic scripts need them, and emoji

_NAMED: Final = re.compile(r"(?P<name>[^<>]*)<(?P<address>[^<>]*)>")
_ATOM: Final = r"[^\s.()<>\[\]:;@\\,\"\x00-\x1f\x7f]+"  # RFC 5322, 3.2.3; RFC 6531, 3.3
_LOCAL_PART: Final = re.compile(rf"{_ATOM}(\.{_ATOM})*")
_DOMAIN: Final = re.compile(
    r"(?!.{254})[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)
# Two versions of IDNA read these characters differently, so a mail could reach another domain (RFC 5894, 7.2).
_AMBIGUOUS: Final = re.compile("[ß\u1e9eς\u200c\u200d]")
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,76}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # all characters that end a line, also for Python
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


class Unsendable(ValueError):
    """No mail can be made of this payload. The text has the field's name, never its content."""


class Address(NamedTuple):
    """An address. name: for display, may be empty. spec: `local@domain`, with the domain in ASCII."""

    name: str
    spec: str

    @property
    def domain(self) -> str:
        return self.spec.rpartition("@")[2]

    @property
    def is_international(self) -> bool:
        return not self.spec.isascii()

    @property
    def written(self) -> str:
        """The text as a header."""
        if not self.name:
            return self.spec
        if self.name.isascii() and len(self.name) <= MAX_SHORT_CHARS and ENCODED_WORD not in self.name:
            quoted = re.sub(r'(["\\])', r"\\\1", self.name)
            return f'"{quoted}" <{self.spec}>'
        return f"{_encoded_words(self.name)}\r\n <{self.spec}>"


@dataclass(frozen=True, slots=True)
class Message:
    """The mail of one transaction. The repr shows only the id.

    id: the Message-ID. recipients: those of to, cc and bcc, each once. content: header and body in lines that end with
        CRLF, without the dots that SMTP adds. international: an address needs the server's SMTPUTF8 (RFC 6531).
    stuffed: the content for DATA, with the added dots, without the final dot. RFC 5321, 4.5.2. Made here, because a large mail
        is made on a thread.
    """

    id: str
    sender: str = field(repr=False)
    recipients: tuple[str, ...] = field(repr=False)
    content: bytes = field(repr=False)
    international: bool
    stuffed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        stuffed = self.content
        if stuffed.startswith(b".") or b"\n." in stuffed:  # most mails have no such line, and are not copied
            stuffed = (b"\n" + stuffed).replace(b"\n.", b"\n..")[1:]  # far faster than a regular expression
        object.__setattr__(self, "stuffed", stuffed)


def compose(
    payload: Any,
    *,
    sender: Address | None,
    key: str,
    key_header: str | None = None,
    date: datetime,
) -> Message:
    """The mail that `payload` describes.

    sender: for a payload without `from`. key: the base of the Message-ID, `key_header` and MIME boundaries. date: for a
    payload without one.
    Raises: `Unsendable` if no mail can be made of the payload.
    """
    if not isinstance(payload, dict):
        raise Unsendable("the payload must be an object")
    if unknown := sorted(payload.keys() - FIELDS):
        raise Unsendable(f"unknown fields {unknown}: a mail has {sorted(FIELDS)}")
    author = _author(payload, sender)
    to, cc, bcc, reply_to = (_addresses(payload, name) for name in ("to", "cc", "bcc", "reply_to"))
    message_id = f"<{key}@{author.domain}>"
    head = [
        ("From", author.written),
        ("To", _written(to)),
        ("Cc", _written(cc)),
        ("Reply-To", _written(reply_to)),
        ("Subject", _subject(payload)),
        ("Date", _date(payload, date)),
        ("Message-ID", message_id),
        *([(key_header, key)] if key_header else []),
        *_custom_headers(payload, key_header).items(),
    ]
    lines = "".join(f"{name}: {value}\r\n" for name, value in head if value)
    return Message(
        id=message_id,
        sender=author.spec,
        recipients=_recipients([*to, *cc, *bcc]),
        content=lines.encode() + _body(payload, key),
        international=any(address.is_international for address in (author, *to, *cc, *bcc, *reply_to)),
    )


# --- addresses


def parse_address(field: str, value: object) -> Address:
    """`Name <local@domain>` or `local@domain`; a domain beyond ASCII is encoded. Raises `Unsendable`, naming `field`."""
    if not isinstance(value, str):
        raise Unsendable(f"{field} must be an address as text")
    _check_characters(field, value, one_line=True)
    named = _NAMED.fullmatch(value.strip())
    name, spec = (_visible(_unquoted(named["name"].strip())), named["address"]) if named else ("", value.strip())
    local_part, at, domain = spec.rpartition("@")
    if not at or not _LOCAL_PART.fullmatch(local_part) or _visible(local_part, spared="") != local_part:
        raise Unsendable(f"{field} is not an address: write it as ada@example.com or Ada <ada@example.com>")
    spec = f"{local_part}@{ascii_domain(field, domain)}"
    if len(local_part.encode()) > MAX_LOCAL_PART_BYTES or len(spec.encode()) > MAX_ADDRESS_BYTES:
        raise Unsendable(
            f"{field} is too long: at most {MAX_LOCAL_PART_BYTES} bytes before the @, and {MAX_ADDRESS_BYTES} in all"
        )
    return Address(name, spec)


def ascii_domain(field: str, domain: str) -> str:
    """`domain` as DNS knows it. Raises `Unsendable`, naming `field`."""
    if _AMBIGUOUS.search(domain):
        raise Unsendable(f"{field} has an ambiguous domain: write its ASCII form (xn--...)")
    try:
        encoded = domain.encode("idna").decode()
    except UnicodeError:
        raise Unsendable(f"{field} has a domain that cannot be encoded") from None
    if not _DOMAIN.fullmatch(encoded):
        raise Unsendable(f"{field} has an invalid domain")
    return encoded


def _author(payload: Mapping[str, Any], sender: Address | None) -> Address:
    if payload.get("from") is not None:
        return parse_address("from", payload["from"])
    if sender is None:
        raise Unsendable("from is missing, and the adapter has no sender of its own")
    return sender


def _recipients(addresses: list[Address]) -> tuple[str, ...]:
    recipients = tuple(dict.fromkeys(address.spec for address in addresses))
    if not recipients:
        raise Unsendable("to, cc and bcc are empty: a mail needs a recipient")
    if len(recipients) > MAX_RECIPIENTS:
        raise Unsendable(
            f"{len(recipients)} recipients, but at most {MAX_RECIPIENTS} are allowed: enqueue several mails"
        )
    return recipients


def _addresses(payload: Mapping[str, Any], name: str) -> list[Address]:
    value = payload.get(name)
    if value is None:
        return []
    if isinstance(value, list):
        return [parse_address(f"{name}[{index}]", one) for index, one in enumerate(value)]
    return [parse_address(name, value)]


def _unquoted(name: str) -> str:
    if len(name) > 1 and name[0] == name[-1] == '"':
        return re.sub(r"\\(.)", r"\1", name[1:-1])
    return name


def _visible(text: str, spared: str = JOINERS) -> str:
    """`text` without invisible characters and those that change the direction of writing, which make two names look equal."""
    return "".join(char for char in text if char in spared or unicodedata.category(char) != "Cf")


def _written(addresses: list[Address]) -> str:
    return ",\r\n ".join(address.written for address in addresses)


# --- headers


def _subject(payload: Mapping[str, Any]) -> str:
    """Short plain text as it is; else encoded words, which hold anything and can be folded. RFC 2047."""
    text = _text(payload, "subject", one_line=True)
    if text is None:
        raise Unsendable("subject is missing: it may be an empty text")
    plain = len(text) <= MAX_SHORT_CHARS and _PRINTABLE.fullmatch(text) and ENCODED_WORD not in text
    return text if plain or not text else _encoded_words(text)


def _encoded_words(text: str) -> str:
    # 60: a continued line starts with a space, and the first one with the header's name.
    return Header(text, "utf-8", maxlinelen=60).encode(linesep="\r\n")


def _date(payload: Mapping[str, Any], default: datetime) -> str:
    given = _text(payload, "date", one_line=True)
    if given is None:
        return format_datetime(default)
    try:
        date = datetime.fromisoformat(given)
    except ValueError:
        raise Unsendable("date is not a date: write it as 2026-11-21T09:30:00+00:00") from None
    if date.tzinfo is None:
        raise Unsendable("date has no offset from UTC: write it as 2026-11-21T09:30:00+00:00")
    return format_datetime(date)


def is_own_header(name: str) -> bool:
    """Whether no header of this name can be asked for, because mail servers or `compose` write it."""
    return name.lower() in OWN_HEADERS or name.lower().startswith(("content-", "resent-"))


def _custom_headers(payload: Mapping[str, Any], key_header: str | None) -> dict[str, str]:
    headers = payload.get("headers")
    if headers is None:
        return {}
    if not isinstance(headers, dict):
        raise Unsendable("headers must be an object")
    seen = {(key_header or "").lower()}
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise Unsendable("headers has a name that cannot be sent as a header")
        if name.lower() in seen or is_own_header(name):
            raise Unsendable(f"headers.{name} is a header that the adapter writes, or occurs twice")
        seen.add(name.lower())
        # Not folded and not encoded: some, as List-Unsubscribe, must stay as they are.
        if not isinstance(value, str) or not _PRINTABLE.fullmatch(value):
            raise Unsendable(f"headers.{name} must be text in printable ASCII, without line breaks")
        if len(f"{name}: {value}") > MAX_LINE_CHARS:
            raise Unsendable(f"headers.{name} is longer than a line: {MAX_LINE_CHARS} characters with its name")
    return headers


# --- body


def _body(payload: Mapping[str, Any], key: str) -> bytes:
    text, html = _text(payload, "text"), _text(payload, "html")
    if text is None and html is None:
        raise Unsendable("text and html are missing: a mail needs one of them")
    body = EmailMessage(policy=MIME)
    if text is not None:
        body.set_content(text, cte="quoted-printable")
    if html is not None and text is None:
        body.set_content(html, subtype="html", cte="quoted-printable")
    elif html is not None:
        body.add_alternative(html, subtype="html", cte="quoted-printable")
    for kind, filename, data in _attachments(payload):
        body.add_attachment(data, kind.maintype, kind.subtype, params=dict(kind.params), filename=filename)
    for number, part in enumerate(body.walk()):
        if part.is_multipart():
            # "=_" is in no quoted-printable and no base64 text (RFC 2045, 6.7).
            part.set_boundary(f"=_{key}_{number}")
    return body.as_bytes()


def _attachments(payload: Mapping[str, Any]) -> Iterator[tuple[Any, str, bytes]]:
    """Each one's parsed Content-Type, file name and content."""
    attachments = payload.get("attachments")
    if attachments is None:
        return
    if not isinstance(attachments, list):
        raise Unsendable("attachments must be a list")
    for index, attachment in enumerate(attachments):
        where = f"attachments[{index}]"
        if not isinstance(attachment, dict) or attachment.keys() != ATTACHMENT_FIELDS:
            raise Unsendable(f"{where} must be an object of {sorted(ATTACHMENT_FIELDS)}")
        filename = _text(attachment, "filename", one_line=True, where=f"{where}.")
        filename = _visible(filename or "")
        if not filename or ENCODED_WORD in filename:
            raise Unsendable(f"{where}.filename is empty, or contains {ENCODED_WORD!r}, which mail programs decode")
        yield _kind(where, attachment), filename, _decoded(where, attachment["base64"])


def _kind(where: str, attachment: Mapping[str, Any]) -> Any:
    content_type = _text(attachment, "content_type", one_line=True, where=f"{where}.")
    kind = MIME.header_factory("Content-Type", content_type or "")
    # RFC 2046, 5.1 and 5.2: a multipart or a message may not be in base64.
    if kind.defects or kind.maintype in {"multipart", "message"} or ENCODED_WORD in (content_type or ""):
        raise Unsendable(f"{where}.content_type must be of the form application/pdf, and neither multipart nor message")
    return kind


def _decoded(where: str, data: object) -> bytes:
    try:
        if isinstance(data, str):
            return base64.b64decode(data.encode("ascii").translate(None, b" \t\r\n"), validate=True)  # RFC 2045, 6.8
    except (binascii.Error, ValueError):
        pass
    raise Unsendable(f"{where}.base64 is not base64")


# --- text


def _text(fields: Mapping[str, Any], name: str, *, one_line: bool = False, where: str = "") -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise Unsendable(f"{where}{name} must be text")
    _check_characters(f"{where}{name}", value, one_line=one_line)
    return value


def _check_characters(field: str, text: str, *, one_line: bool) -> None:
    """A line break in a header would start another one; a lone surrogate is no text."""
    if _SURROGATE.search(text):
        raise Unsendable(f"{field} contains a lone surrogate, which is not a character")
    if one_line and _CONTROL.search(text):
        raise Unsendable(f"{field} contains a line break or another control character")
