"""Bodies in Django that something has read before the claim, that come in chunks, or that are too large."""

from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest
from django.test import Client
from support.bodies import CONTENT, HEADERS, LIMIT, django_shop_maker, statuses
from support.database import Database

import outbox


class Reading:
    """A middleware that reads the body before the claim."""

    how: Callable[[HttpRequest], Any]

    def __init__(self, get_response: Any) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> Any:
        type(self).how(request)
        return self._get_response(request)


@pytest.fixture
def django_shop(postgresql: Database, ob: outbox.Outbox, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    return django_shop_maker(postgresql, ob, monkeypatch)


CSRF = "django.middleware.csrf.CsrfViewMiddleware"


@pytest.mark.parametrize("by", ["field", "header"])
def test_in_django_all_of_a_multipart_form_under_csrf_counts(django_shop: Callable[..., Client], by: str) -> None:
    client = django_shop(CSRF, csrf=True)
    secret = client.get("/token").content.decode()
    headers = {"Idempotency-Key": "retry-001"} | ({"X-CSRFToken": secret} if by == "header" else {})

    def post(boundary: str = "b1", *, items: list[str] | None = None, **changed: Any) -> Any:
        sent = {"content": b"a receipt", "name": "r.txt", "kind": "text/plain"} | changed
        file = SimpleUploadedFile(sent["name"], sent["content"], sent["kind"])
        fields = {"item": items or ["book", "ring"], "receipt": file}
        fields |= {"csrfmiddlewaretoken": secret} if by == "field" else {}
        body = encode_multipart(boundary, fields)
        return client.post("/orders", body, f"multipart/form-data; boundary={boundary}", headers=headers)

    first, retry, rebuilt = post(), post(), post("b2")
    others = [post(items=["car", "ring"]), post(items=["ring"]), post(content=b"a Receipt"), post(name="s.txt")]

    assert (first.status_code, retry.status_code, rebuilt.status_code) == (201, 201, 201)
    assert b"a receipt" in first.content
    assert first.content == retry.content == rebuilt.content
    assert [answer.status_code for answer in others] == [422] * 4


@pytest.mark.parametrize(
    ("kind", "how", "is_kept"),
    [
        ("application/json", lambda request: request.read(), False),
        ("application/json", lambda request: request.read(5), False),
        ("application/json", lambda request: request.body, True),
        ("application/x-www-form-urlencoded", lambda request: request.POST, True),
        ("multipart/form-data; boundary=b1", lambda request: request.read(), False),
    ],
)
def test_in_django_what_read_the_body_before_makes_no_two_requests_one(
    django_shop: Callable[..., Client], kind: str, how: Any, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reading, "how", staticmethod(how), raising=False)
    client = django_shop(f"{__name__}.Reading")

    def post(body: str) -> int:
        answer = client.post("/orders", body, kind, headers={"Idempotency-Key": "retry-001"})
        return int(answer.status_code)

    if is_kept:
        assert [post("amount=1"), post("amount=1"), post("amount=9")] == [201, 201, 422]
    else:
        with pytest.raises(outbox.ClaimError) as refused:
            post("amount=1")
        assert str(refused.value) == (
            "the request's body was read before the claim, and nothing of it is left, so a retry could not be distinguished from"
            " another request: read request.body before the claim instead, because Django keeps it, or set"
            " Idempotency(content=...)"
        )


def test_in_django_a_body_in_chunks_that_it_cannot_see_is_refused(django_shop: Callable[..., Client]) -> None:
    client = django_shop()
    chunked = HEADERS | {"Transfer-Encoding": "chunked"}

    answer = client.post("/orders", b"amount=1", "text/plain", headers=chunked, CONTENT_LENGTH="")

    assert (answer.status_code, answer.json()["detail"]) == (
        400,
        "the request's body came in chunks and is empty: send Content-Length instead",
    )


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("limits", [(LIMIT, LIMIT * 2), (LIMIT * 2, LIMIT)])
def test_in_django_no_more_is_read_than_is_allowed(
    django_shop: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, content: str, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(settings, "DATA_UPLOAD_MAX_MEMORY_SIZE", limits[1])
    read_it = {"content": lambda request: request.body[:1]} if content == "content" else {}
    client = django_shop(**read_it)

    def post(size: int, key: str) -> Any:
        return client.post("/orders", b"x" * size, "text/plain", headers={"Idempotency-Key": key})

    assert post(LIMIT, "retry-001").status_code == 201
    answer = post(LIMIT + 1, "retry-002")
    assert (answer.status_code, answer.headers["Content-Type"]) == (413, "application/problem+json")
    assert f"has more than {LIMIT} bytes" in answer.json()["detail"]


def test_in_django_on_asgi_a_body_in_chunks_is_recognised_and_limited(django_shop: Callable[..., Client]) -> None:
    django_shop()

    assert statuses(ASGIHandler(), [b"1", b"1", b"2", b"x" * (LIMIT + 1)], "chunks") == [201, 201, 422, 413]


def encode_multipart(boundary: str, fields: dict[str, Any]) -> bytes:
    lines: list[bytes] = []
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            disposition = f'Content-Disposition: form-data; name="{name}"'
            if isinstance(item, str):
                head, body = [disposition], item.encode()
            else:
                head = [f'{disposition}; filename="{item.name}"', f"Content-Type: {item.content_type}"]
                body = item.read()
            lines += [f"--{boundary}".encode(), *(line.encode() for line in head), b"", body]
    return b"\r\n".join([*lines, f"--{boundary}--".encode(), b""])
