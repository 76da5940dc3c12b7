"""What an e-mail's payload becomes: recipients and bytes, or a refusal that names the field."""

import base64
import re
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.email_messages import KEY, MAIL, PDF, made, parsed, words

from dispatchers.adapters.email.message import Message, Unsendable

FULL = {
    **MAIL,
    "cc": ["Bob <bob@example.com>"],
    "bcc": "eve@example.com",
    "reply_to": "help@example.com",
    "html": "<p>Dear Ada</p>\n",
    "date": "2026-11-21T09:30:00+00:00",
    "headers": {"X-Order": "42"},
    "attachments": [PDF],
}


def lines(text: str) -> list[str]:
    """`text` by the line breaks that a mail knows, without those at its end."""
    return re.split("\r\n|\r|\n", text.rstrip("\r\n"))


# --- bytes


def test_the_same_payload_and_key_give_the_same_bytes() -> None:
    assert made(FULL).content == made(FULL).content


def test_the_bytes_are_those_that_an_earlier_release_made() -> None:
    """Every attempt sends them, also across a deploy: a change of this changes what is in doubt."""
    content = made({**MAIL, "html": "<p>ü</p>"}, key_header="X-Key").content

    assert content.decode().split("\r\n") == [
        'From: "Shop" <shop@example.com>',
        "To: ada@example.com",
        "Subject: Your invoice",
        "Date: Sat, 21 Nov 2026 09:30:00 +0000",
        f"Message-ID: <{KEY}@example.com>",
        f"X-Key: {KEY}",
        "MIME-Version: 1.0",
        "Content-Type: multipart/alternative;",
        f' boundary="=_{KEY}_0"',
        "",
        f"--=_{KEY}_0",
        'Content-Type: text/plain; charset="utf-8"',
        "Content-Transfer-Encoding: quoted-printable",
        "",
        "Dear Ada",
        "",
        f"--=_{KEY}_0",
        'Content-Type: text/html; charset="utf-8"',
        "Content-Transfer-Encoding: quoted-printable",
        "MIME-Version: 1.0",
        "",
        "<p>=C3=BC</p>",
        "",
        f"--=_{KEY}_0--",
        "",
    ]


def test_another_key_is_another_message_id() -> None:
    assert made().id == f"<{KEY}@example.com>"
    assert made(key="ck1_other").id == "<ck1_other@example.com>"


def test_text_html_and_attachments_are_all_there() -> None:
    message = parsed(FULL)

    plain, html = message.get_body(("plain",)), message.get_body(("html",))
    assert plain is not None
    assert html is not None
    assert plain.get_content() == "Dear Ada\r\n"
    assert html.get_content() == "<p>Dear Ada</p>\r\n"
    (attachment,) = message.iter_attachments()
    assert attachment.get_filename() == "invoice.pdf"
    assert attachment.get_content_type() == "application/pdf"
    assert attachment.get_content() == b"%PDF\r\n\0\xff"


def test_an_html_alone_is_the_whole_body() -> None:
    message = parsed({"to": "ada@example.com", "subject": "", "html": "<p>Dear Zoë</p>"})

    assert message.get_content_type() == "text/html"
    assert message.get_content() == "<p>Dear Zoë</p>\r\n"
    assert message["Content-Transfer-Encoding"] == "quoted-printable"


def test_a_content_type_keeps_its_parameters() -> None:
    invitation = {**PDF, "content_type": "text/calendar; method=REQUEST; charset=utf-8"}

    (attachment,) = parsed({**MAIL, "attachments": [invitation]}).iter_attachments()

    assert attachment["Content-Type"].params == {"method": "REQUEST", "charset": "utf-8"}


def test_a_boundary_in_the_text_separates_nothing() -> None:
    text = f"--=_{KEY}_0\nContent-Type: text/html\n\n<p>forged</p>\n--=_{KEY}_0--\n"

    message = parsed({**MAIL, "text": text, "html": "<p>true</p>"})

    assert [part.get_content_type() for part in message.walk()] == ["multipart/alternative", "text/plain", "text/html"]
    plain = message.get_body(("plain",))
    assert plain is not None
    assert lines(plain.get_content()) == lines(text)


def test_a_header_beyond_the_usual_stays_as_it_is() -> None:
    unsubscribe = f"<https://example.com/unsubscribe?token={'x' * 500}>"

    content = made({**MAIL, "headers": {"List-Unsubscribe": unsubscribe}}).content

    assert f"\r\nList-Unsubscribe: {unsubscribe}\r\n".encode() in content


def test_the_repr_shows_nothing_of_the_mail() -> None:
    assert repr(made(FULL)) == f"Message(id='<{KEY}@example.com>', international=False)"


def test_each_recipient_is_asked_for_once() -> None:
    message = made({**MAIL, "cc": ["Ada <ada@example.com>", "bob@example.com"], "bcc": ["bob@example.com"]})

    assert message.recipients == ("ada@example.com", "bob@example.com")


def test_a_mail_to_hidden_recipients_only_is_one() -> None:
    message = made({"bcc": ["ada@example.com"], "subject": "", "text": ""})

    assert message.recipients == ("ada@example.com",)
    assert b"ada@" not in message.content


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    subject=words,
    filename=words.map(str.strip).filter(lambda name: name and "=?" not in name),
)
@example(text="." * 300 + "\n.\n..\n", subject="=?utf-8?q?forged?=", filename="a" * 300)
@example(text="x" * 2000 + "\r.\r\n \t\n", subject="x" * 2000, filename='a"b\\c; d=e.pdf')
@example(text="", subject=" spaces ", filename="räch" * 40)
@example(text="", subject="", filename='""')
def test_whatever_is_written_arrives_in_lines_that_every_server_takes(text: str, subject: str, filename: str) -> None:
    payload = {**MAIL, "text": text, "subject": subject, "attachments": [{**PDF, "filename": filename}]}

    message = made(payload)

    assert message.content.isascii()
    assert b"\n" not in message.content.replace(b"\r\n", b"")
    assert b"\r" not in message.content.replace(b"\r\n", b"")
    assert message.content.endswith(b"\r\n")
    assert max(map(len, message.content.split(b"\r\n"))) <= 998
    read = message_from_bytes(message.content, policy=default)
    assert isinstance(read, EmailMessage)
    body = read.get_body(("plain",))
    assert body is not None
    assert lines(body.get_content()) == lines(text)
    assert (read["Subject"] or "") == subject
    (attachment,) = read.iter_attachments()
    assert attachment["Content-Disposition"].params["filename"] == filename  # `get_filename` takes quotes off it
    assert attachment.get_content() == b"%PDF\r\n\0\xff"


@given(content=st.lists(st.sampled_from([b".", b"..", b".a", b"a", b""])))
def test_no_line_but_the_final_dot_is_a_dot(content: list[bytes]) -> None:
    text = b"".join(line + b"\r\n" for line in content)

    stuffed = Message(id="", sender="", recipients=(), content=text, international=False).stuffed

    assert b"." not in stuffed.split(b"\r\n")
    assert b"".join(re.sub(rb"^\.", b"", line) + b"\r\n" for line in stuffed.split(b"\r\n")[:-1]) == text


# --- refusals


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"sbject": "x"},
            "unknown fields ['sbject']: a mail has ['attachments', 'bcc', 'cc', 'date', 'from', 'headers',",
        ),
        ({"to": None}, "to, cc and bcc are empty: a mail needs a recipient"),
        (
            {"to": [f"a{n}@example.com" for n in range(101)]},
            "101 recipients, but at most 100 are allowed: enqueue several mails",
        ),
        ({"to": ["ada@example.com", "bob"]}, "to[1] is not an address"),
        ({"cc": {"a": 1}}, "cc must be an address as text"),
        ({"from": ["a@example.com"]}, "from must be an address as text"),
        ({"reply_to": "x"}, "reply_to is not an address"),
        ({"subject": None}, "subject is missing: it may be an empty text"),
        ({"subject": 7}, "subject must be text"),
        ({"subject": "a\nBcc: eve@example.com"}, "subject contains a line break or another control character"),
        ({"subject": "a\x0bb"}, "subject contains a line break or another control character"),
        ({"subject": "a\x85b"}, "subject contains a line break or another control character"),
        ({"subject": "\udc80"}, "subject contains a lone surrogate, which is not a character"),
        ({"text": None}, "text and html are missing: a mail needs one of them"),
        ({"text": ["x"]}, "text must be text"),
        ({"html": "\ud800"}, "html contains a lone surrogate, which is not a character"),
        ({"date": "tomorrow"}, "date is not a date: write it as 2026-11-21T09:30:00+00:00"),
        ({"date": "2026-11-21T09:30:00"}, "date has no offset from UTC"),
        ({"headers": []}, "headers must be an object"),
        ({"headers": {"X Y": "z"}}, "headers has a name that cannot be sent as a header"),
        ({"headers": {"X-Y\r\nBcc": "z"}}, "headers has a name that cannot be sent as a header"),
        ({"headers": {"bcc": "eve@example.com"}}, "headers.bcc is a header that the adapter writes, or occurs twice"),
        (
            {"headers": {"Content-Type": "text/html"}},
            "headers.Content-Type is a header that the adapter writes, or occurs twice",
        ),
        ({"headers": {"X-KEY": "forged"}}, "headers.X-KEY is a header that the adapter writes, or occurs twice"),
        ({"headers": {"X-A": "1", "x-a": "2"}}, "headers.x-a is a header that the adapter writes, or occurs twice"),
        ({"headers": {"X-A": "1\r\nBcc: eve@example.com"}}, "headers.X-A must be text in printable ASCII"),
        ({"headers": {"X-A": "ü"}}, "headers.X-A must be text in printable ASCII, without line breaks"),
        ({"headers": {"X-A": 1}}, "headers.X-A must be text in printable ASCII"),
        ({"headers": {"X-A": "x" * 994}}, "headers.X-A is longer than a line: 998 characters with its name"),
        ({"attachments": {}}, "attachments must be a list"),
        ({"attachments": ["x"]}, "attachments[0] must be an object of ['base64', 'content_type', 'filename']"),
        ({"attachments": [PDF, {**PDF, "cid": "x"}]}, "attachments[1] must be an object of"),
        ({"attachments": [{**PDF, "filename": ""}]}, "attachments[0].filename is empty"),
        ({"attachments": [{**PDF, "filename": "a\r\nb"}]}, "attachments[0].filename contains a line break"),
        ({"attachments": [{**PDF, "content_type": "pdf"}]}, "attachments[0].content_type must be of the form"),
        ({"attachments": [{**PDF, "content_type": None}]}, "attachments[0].content_type must be of the form"),
        (
            {"attachments": [{**PDF, "content_type": "a/b\r\nX: y"}]},
            "attachments[0].content_type contains a line break",
        ),
        (
            {"attachments": [{**PDF, "content_type": "message/rfc822"}]},
            "attachments[0].content_type must be of the form",
        ),
        ({"attachments": [{**PDF, "base64": "a?=="}]}, "attachments[0].base64 is not base64"),
        ({"attachments": [{**PDF, "base64": "ü"}]}, "attachments[0].base64 is not base64"),
        ({"attachments": [{**PDF, "base64": 7}]}, "attachments[0].base64 is not base64"),
    ],
)
def test_what_is_no_mail_is_refused_by_the_field_s_name(change: Any, problem: str) -> None:
    with pytest.raises(Unsendable) as refused:
        made({**MAIL, **change}, key_header="X-Key")

    assert str(refused.value).startswith(problem)


def test_an_attachments_base64_may_come_in_lines() -> None:
    """As `base64.encodebytes` and most mail programs write it: RFC 2045, 6.8."""
    in_lines = base64.encodebytes(b"%PDF" * 100).decode().replace("\n", "\r\n")
    (attachment,) = parsed({**MAIL, "attachments": [{**PDF, "base64": in_lines}]}).iter_attachments()

    assert attachment.get_content() == b"%PDF" * 100
