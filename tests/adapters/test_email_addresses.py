"""Addresses and names in an e-mail: what is read as one, what is refused, and that neither becomes the other."""

from typing import Any

import pytest
from hypothesis import example, given
from support.email_messages import MAIL, PDF, encoded_words, made, parsed, words

from dispatchers.adapters.email.message import Address, Unsendable, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ada@example.com", Address("", "ada@example.com")),
        (" Ada <ada@example.com> ", Address("Ada", "ada@example.com")),
        ("<ada@example.com>", Address("", "ada@example.com")),
        ('"Lovelace, Ada \\"A\\"" <ada@example.com>', Address('Lovelace, Ada "A"', "ada@example.com")),
        ("Lovelace, Ada <ada@example.com>", Address("Lovelace, Ada", "ada@example.com")),
        ("o'neil+tag=1/2@mail.example.com", Address("", "o'neil+tag=1/2@mail.example.com")),
        ("root@localhost", Address("", "root@localhost")),
        ("zoe@exämple.com", Address("", "zoe@xn--exmple-cua.com")),
        ("zoë@example.com", Address("", "zoë@example.com")),
    ],
)
def test_an_address_is_read(text: str, address: Address) -> None:
    assert parse_address("to", text) == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (7, "to must be an address as text"),
        ("", "to is not an address: write it as ada@example.com or Ada <ada@example.com>"),
        ("ada", "to is not an address"),
        ("@example.com", "to is not an address"),
        ("a..b@example.com", "to is not an address"),
        ("a b@example.com", "to is not an address"),
        ("a\u00a0b@example.com", "to is not an address"),
        ("ada@example.com, bob@example.com", "to is not an address"),
        ("ada@example.com> SIZE=1 <x@example.com", "to is not an address"),
        ("Ada <ada@example.com> <bob@example.com>", "to is not an address"),
        ('"a b"@example.com', "to is not an address"),
        ("ada@", "to has an invalid domain"),
        ("ada@exa mple.com", "to has an invalid domain"),
        ("ada@-example.com", "to has an invalid domain"),
        ("ada@[127.0.0.1]", "to has an invalid domain"),
        ("ada@example..com", "to has a domain that cannot be encoded"),
        (f"ada@{'a' * 64}.com", "to has a domain that cannot be encoded"),
        ("ada@straße.de", "to has an ambiguous domain: write its ASCII form (xn--...)"),
        (f"{'a' * 65}@example.com", "to is too long: at most 64 bytes before the @, and 254 in all"),
        (f"{'a' * 60}@{'.'.join(['a' * 60] * 3)}.{'a' * 20}", "to is too long"),
        (f"ada@{'.'.join(['a' * 60] * 5)}", "to has an invalid domain"),
        ("ada@example.com\r\nBcc: eve@example.com", "to contains a line break or another control character"),
        ("Ada\u2028 <ada@example.com>", "to contains a line break or another control character"),
        ("\ud800@example.com", "to contains a lone surrogate, which is not a character"),
    ],
)
def test_what_is_no_address_is_refused_without_showing_it(text: Any, problem: str) -> None:
    with pytest.raises(Unsendable) as refused:
        made({**MAIL, "to": text})

    assert str(refused.value).startswith(problem)
    assert "bob@" not in str(refused.value)


@given(name=words)
@example(name='Lovelace, "Ada" \\')
@example(name="Zoë, " * 30)
@example(name="x" * 300)
def test_a_name_never_becomes_an_address(name: str) -> None:
    name = name.strip().replace("<", "").replace(">", "").strip('"').strip()

    (address,) = parsed({**MAIL, "to": [f"{name} <ada@example.com>"]})["To"].addresses

    assert address.addr_spec == "ada@example.com"
    assert "".join(address.display_name.split()) == "".join(name.split())


@given(before=words, word=encoded_words, after=words)
def test_nothing_is_decoded_into_a_header(before: str, word: str, after: str) -> None:
    """Python's own reader, for one, decodes an encoded word in quotes, and in a parameter."""
    name = f"{before} {word} {after}".replace("<", "").replace(">", "").strip()
    payload = {**MAIL, "subject": name, "to": f'"{name}" <ada@example.com>', "reply_to": f"{name} <ada@example.com>"}

    content = made(payload).content
    read = parsed(payload)

    assert b"\r\nBcc" not in content
    assert b"\nBcc" not in content
    assert read["Subject"] == name
    for header in ("To", "Reply-To"):
        assert [address.addr_spec for address in read[header].addresses] == ["ada@example.com"]


@pytest.mark.parametrize("field", ["filename", "content_type"])
@given(word=encoded_words)
def test_no_encoded_word_names_an_attachment(field: str, word: str) -> None:
    given_name = {"filename": f"a {word}.pdf", "content_type": f'application/pdf; name="{word}"'}[field]

    with pytest.raises(Unsendable, match=rf"attachments\[0\]\.{field}"):
        made({**MAIL, "attachments": [{**PDF, field: given_name}]})


INVISIBLE = "\u202e\u2066\u200b\u2060\ufeff\u00ad\u200e\U000e0041"


@pytest.mark.parametrize("char", INVISIBLE)
def test_invisible_characters_are_dropped_in_names_refused_in_addresses(char: str) -> None:
    """It would turn `gpj.exe` round, or make two names look alike."""
    mail = parsed({**MAIL, "to": f"A{char}da <ada@example.com>", "attachments": [{**PDF, "filename": f"a{char}.pdf"}]})

    assert mail["To"].addresses[0].display_name == "Ada"
    assert next(mail.iter_attachments()).get_filename() == "a.pdf"
    with pytest.raises(Unsendable, match="to is not an address"):
        made({**MAIL, "to": f"a{char}da@example.com"})


def test_a_name_keeps_what_its_script_is_spelt_with() -> None:
    for name in ("علی‌رضا", "क्‍ष", "👩‍💻"):
        assert parsed({**MAIL, "to": f"{name} <ada@example.com>"})["To"].addresses[0].display_name == name


def test_several_names_are_in_lines_of_their_own() -> None:
    to = parsed({**MAIL, "to": ["Ada <ada@example.com>", "Zoë, B <zoe@example.com>", "bob@example.com"]})["To"]

    assert [address.addr_spec for address in to.addresses] == ["ada@example.com", "zoe@example.com", "bob@example.com"]
    assert [address.display_name for address in to.addresses] == ["Ada", "Zoë, B", ""]


def test_an_address_beyond_ascii_anywhere_needs_the_server_s_consent() -> None:
    assert not made({**MAIL, "to": "Zoë <zoe@exämple.com>"}).international
    for name in ("to", "cc", "bcc", "from", "reply_to"):
        assert made({**MAIL, name: "zoë@example.com"}).international
