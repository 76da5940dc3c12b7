"""`outbox.Response`: one type for an answer that is stored, and for one that is sent."""

import pickle

import pytest

import outbox

COOKIES = outbox.Response(201, b"", [("Set-Cookie", "a=1"), ("ETag", "v1"), ("set-cookie", "b=2")])


def test_a_header_is_found_by_its_name_in_any_case() -> None:
    response = outbox.Response(200, b"{}", {"Content-Type": "application/json"})

    assert response.headers["content-type"] == "application/json"
    assert response.headers.get("CONTENT-TYPE") == "application/json"
    assert "content-type" in response.headers
    assert response.headers.get("ETag") is None
    with pytest.raises(KeyError, match="ETag"):
        _ = response.headers["ETag"]


def test_lines_of_one_name_are_kept_apart_and_read_joined() -> None:
    assert COOKIES.headers.lines == (("Set-Cookie", "a=1"), ("ETag", "v1"), ("set-cookie", "b=2"))
    assert dict(COOKIES.headers) == {"Set-Cookie": "a=1, b=2", "ETag": "v1"}
    assert len(COOKIES.headers) == 2


def test_responses_are_equal_whatever_the_case_of_their_headers_names() -> None:
    assert outbox.Response(200, b"", {"ETag": "v1"}) == outbox.Response(200, b"", [("etag", "v1")])
    assert outbox.Response(200, b"", {"ETag": "v1"}) != outbox.Response(200, b"", {"ETag": "v2"})
    assert outbox.Response(200).headers == {}


def test_a_response_of_another_s_headers_has_all_their_lines() -> None:
    copied = outbox.Response(201, b"", COOKIES.headers)

    assert copied == COOKIES
    assert copied.headers.lines == COOKIES.headers.lines
    assert pickle.loads(pickle.dumps(COOKIES)) == COOKIES
    assert repr(copied.headers) == "Headers([('Set-Cookie', 'a=1'), ('ETag', 'v1'), ('set-cookie', 'b=2')])"
