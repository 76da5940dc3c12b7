"""The faulty server has the faults that it declares: a kinder one would let adapters pass."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from dispatchers.testing import faulty_http
from dispatchers.testing.faulty_http import Behaviour, FaultyHttp


def put(remote: FaultyHttp, behaviour: Behaviour, **settings: object) -> httpx.Response:
    remote.behave(behaviour)
    timeout = httpx.Timeout(60, read=0.3 if behaviour is faulty_http.hang else 60)
    return httpx.put(f"{remote.url}/contacts?a=1", content=b"\xff{}", trust_env=False, timeout=timeout, **settings)  # type: ignore[arg-type]


def test_it_gives_the_set_answer_and_records_what_arrived(remote: FaultyHttp) -> None:
    response = put(remote, faulty_http.answer(422, headers={"Retry-After": "7"}, json={"id": 7}), headers={"X-A": "b"})

    (request,) = remote.requests
    assert (response.status_code, response.headers["Retry-After"], response.json()) == (422, "7", {"id": 7})
    assert (request.method, request.target, request.body) == ("PUT", "/contacts?a=1", b"\xff{}")
    assert request.headers["x-a"] == "b"
    assert bytes(request).startswith(b"PUT /contacts?a=1\r\n")
    assert bytes(request).endswith(b"\r\n\r\n\xff{}")


def test_a_body_in_chunks_is_recorded_as_a_whole(remote: FaultyHttp) -> None:
    httpx.put(remote.url, content=iter([b"one", b"two"]), trust_env=False)

    assert [request.body for request in remote.requests] == [b"onetwo"]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (faulty_http.close, httpx.RemoteProtocolError),
        (faulty_http.reset, httpx.ReadError),
        (faulty_http.garble, httpx.RemoteProtocolError),
        (faulty_http.hang, httpx.ReadTimeout),
        (faulty_http.giant_head(), httpx.RemoteProtocolError),
        (faulty_http.cut_short(), httpx.RemoteProtocolError),
        (faulty_http.reset_in_body(), httpx.ReadError),
    ],
)
def test_a_client_that_hopes_for_the_best_meets(
    remote: FaultyHttp, behaviour: Behaviour, error: type[Exception]
) -> None:
    with pytest.raises(error):
        put(remote, behaviour)

    assert len(remote.requests) == 1


def test_a_quotation_holds_the_credentials_where_services_write_texts(remote: FaultyHttp) -> None:
    response = put(remote, faulty_http.echo(402), headers={"Authorization": "Bearer sesame"})

    assert response.status_code == 402
    assert "Bearer sesame" in response.json()["error"]["message"]
    assert "Bearer sesame" in response.headers["X-Quoted"]


def test_who_waits_is_cut_off_when_the_behaviour_changes(remote: FaultyHttp) -> None:
    remote.behave(faulty_http.hang)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(httpx.put, remote.url, trust_env=False, timeout=60)
        while not remote.requests and not waiting.done():
            time.sleep(0.005)  # until it is read, it does not wait for an answer
        remote.behave(faulty_http.answer())
        error = waiting.exception(timeout=60)

    assert isinstance(error, httpx.RemoteProtocolError)
    assert len(remote.requests) == 1


def test_a_server_that_does_not_run_says_so() -> None:
    with pytest.raises(RuntimeError, match="this server does not run: `with faulty_http\\(\\) as remote:`"):
        FaultyHttp().behave(faulty_http.hang)
