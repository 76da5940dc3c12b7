"""The hostile server does what it says: a far side that is kinder than promised would let adapters pass."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dispatchers.testing import hostile_http
from dispatchers.testing.hostile_http import DRIP_SECONDS, LARGE_BYTES, Behaviour, HostileHttp


@pytest.fixture
def far_side() -> Iterator[HostileHttp]:
    with hostile_http.hostile_http() as running:
        yield running


def put(far_side: HostileHttp, behaviour: Behaviour, **settings: object) -> httpx.Response:
    far_side.behave(behaviour)
    return httpx.put(f"{far_side.url}/contacts?a=1", content=b"\xff{}", trust_env=False, timeout=0.3, **settings)  # type: ignore[arg-type]


def test_it_answers_as_told_and_records_what_arrived(far_side: HostileHttp) -> None:
    response = put(
        far_side, hostile_http.answer(422, headers={"Retry-After": "7"}, json={"id": 7}), headers={"X-A": "b"}
    )

    (request,) = far_side.requests
    assert (response.status_code, response.headers["Retry-After"], response.json()) == (422, "7", {"id": 7})
    assert (request.method, request.target, request.body) == ("PUT", "/contacts?a=1", b"\xff{}")
    assert request.headers["x-a"] == "b"
    assert bytes(request).startswith(b"PUT /contacts?a=1\r\n")
    assert bytes(request).endswith(b"\r\n\r\n\xff{}")


def test_a_body_in_chunks_is_recorded_as_a_whole(far_side: HostileHttp) -> None:
    httpx.put(far_side.url, content=iter([b"one", b"two"]), trust_env=False)

    assert [request.body for request in far_side.requests] == [b"onetwo"]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (hostile_http.close, httpx.RemoteProtocolError),
        (hostile_http.reset, httpx.ReadError),
        (hostile_http.garble, httpx.RemoteProtocolError),
        (hostile_http.hang, httpx.ReadTimeout),
        (hostile_http.giant_head(), httpx.RemoteProtocolError),
        (hostile_http.cut_short(), httpx.RemoteProtocolError),
        (hostile_http.reset_in_body(), httpx.ReadError),
    ],
)
def test_a_client_that_hopes_for_the_best_meets(
    far_side: HostileHttp, behaviour: Behaviour, error: type[Exception]
) -> None:
    with pytest.raises(error):
        put(far_side, behaviour)

    assert len(far_side.requests) == 1


def test_nobody_listens_where_connections_are_refused(far_side: HostileHttp) -> None:
    with pytest.raises(httpx.ConnectError):
        put(far_side, hostile_http.refuse)

    assert far_side.requests == []


@pytest.mark.parametrize("behaviour", [hostile_http.drip_head, hostile_http.drip_body()])
def test_a_drip_outlasts_every_timeout_of_a_single_read(far_side: HostileHttp, behaviour: Behaviour) -> None:
    far_side.behave(behaviour)
    url = httpx.URL(far_side.url)

    with socket.create_connection((url.host, int(url.port or 0)), timeout=1) as connection:
        connection.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        started = time.monotonic()
        while time.monotonic() < started + 10 * DRIP_SECONDS:
            assert connection.recv(1)  # raises when a second passes without a byte


@pytest.mark.parametrize("behaviour", [hostile_http.giant(), hostile_http.gzip_bomb()])
def test_a_giant_is_as_large_as_it_says(far_side: HostileHttp, behaviour: Behaviour) -> None:
    far_side.behave(behaviour)

    response = httpx.put(far_side.url, trust_env=False, timeout=30)

    assert len(response.content) == LARGE_BYTES


def test_a_quotation_holds_the_credentials_where_services_write_texts(far_side: HostileHttp) -> None:
    response = put(far_side, hostile_http.echo(402), headers={"Authorization": "Bearer sesame"})

    assert response.status_code == 402
    assert "Bearer sesame" in response.json()["error"]["message"]
    assert "Bearer sesame" in response.headers["X-Quoted"]


def test_who_waits_is_cut_off_when_the_behaviour_changes(far_side: HostileHttp) -> None:
    far_side.behave(hostile_http.hang)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(httpx.put, far_side.url, trust_env=False, timeout=30)
        while not far_side.requests and not waiting.done():
            time.sleep(0.005)  # until it is read, it does not wait for an answer
        far_side.behave(hostile_http.answer())
        error = waiting.exception(timeout=10)

    assert isinstance(error, httpx.RemoteProtocolError)
    assert len(far_side.requests) == 1


def test_a_redirect_leads_to_where_a_follower_is_seen(far_side: HostileHttp) -> None:
    with pytest.raises(httpx.TooManyRedirects):
        put(far_side, hostile_http.redirect(307), follow_redirects=True)

    assert {request.target for request in far_side.requests} == {"/contacts?a=1", "/elsewhere"}


def test_an_answer_comes_twice_to_one_request(far_side: HostileHttp) -> None:
    far_side.behave(hostile_http.answer_twice())
    url = httpx.URL(far_side.url)

    with socket.create_connection((url.host, int(url.port or 0)), timeout=1) as connection:
        connection.sendall(b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        received = b""
        while received.count(b"{}") < 2:
            received += connection.recv(65536)

    assert received.count(b"HTTP/1.1 200") == 2


def test_a_server_that_does_not_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="this server does not run: `with hostile_http\\(\\) as far_side:`"):
        HostileHttp().behave(hostile_http.hang)
