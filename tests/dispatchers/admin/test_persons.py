"""Names of operators: another spelling of one name is the same person, another name is not."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatchers.admin.decide.persons import is_same_person


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Ada", " ada "),
        ("José", unicodedata.normalize("NFD", "José")),
        ("ada", "ａｄａ"),
        ("ada", "a\u200bd\u2060a\ufeff"),
        ("ada", "a\u00adda\ufe0f"),
        ("ada", "ad\u034fa\u3164"),
        ("Ada Lovelace", "Ada\u00a0 \t Lovelace"),
        ("STRASSE", "straße"),
        ("ﬁona", "FIONA"),
        ("e\u200b\u0301ve", "éve"),
    ],
)
def test_another_spelling_is_the_same_person(first: str, second: str) -> None:
    assert is_same_person(first, second)
    assert is_same_person(second, first)


@pytest.mark.parametrize(
    ("first", "second"), [("ada", "adam"), ("José", "Jose"), ("สม", "สิม"), ("ada", "аda"), ("ada l", "adal")]
)
def test_another_name_is_another_person(first: str, second: str) -> None:
    assert not is_same_person(first, second)


@given(st.text())
def test_every_normal_form_of_a_name_is_the_same_person(name: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert is_same_person(name, unicodedata.normalize(form, name))
