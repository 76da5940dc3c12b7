"""A service of AWS that answers badly: the faulty HTTP server, whose requests are the entries in them."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import boto3

from dispatchers.testing.faulty_http import Behaviour, FaultyHttp, Request, answer, faulty_http

SECRET = "open-sesame-5eb63bbb"
TOKEN = "token-8d5e957f297893487bd98fa830fa6413"
SESSION = boto3.Session("AKIDEXAMPLE", SECRET, TOKEN, region_name="eu-central-1")
ITEMS = [str(number) for number in range(10)]  # an answer may list more entries than the request had


class FaultyAws:
    """entries_of: the entries in the body of a request."""

    def __init__(self, http: FaultyHttp, entries_of: Callable[[bytes], Sequence[Any]]) -> None:
        self.http = http
        self.behave = http.behave
        self._entries_of = entries_of

    @property
    def requests(self) -> list[bytes]:
        found = [each for request in self.http.requests for each in self._entries_of(request.body)]
        return [json.dumps(each, sort_keys=True).encode() for each in found]


@contextmanager
def faulty_aws(entries_of: Callable[[bytes], Sequence[Any]]) -> Iterator[FaultyAws]:
    with faulty_http() as http:
        yield FaultyAws(http, entries_of)


def sqs_entries(body: bytes) -> Sequence[Any]:
    return [{**each, "Id": ""} for each in json.loads(body)["Entries"]]


def sns_entries(body: bytes) -> Sequence[Any]:
    """Of the fields `PublishBatchRequestEntries.member.1.Message`."""
    entries: dict[str, dict[str, str]] = {}
    for name, value in parse_qsl(body.decode()):
        if name.startswith("PublishBatchRequestEntries.member."):
            number, field = name.split(".", 3)[2:]
            entries.setdefault(number, {})[field] = value
    return [{**each, "Id": ""} for each in entries.values()]


def sqs_taken() -> Behaviour:
    return answer(
        200, json={"Successful": [{"Id": each, "MessageId": "m-1", "MD5OfMessageBody": ""} for each in ITEMS]}
    )


def sqs_failed(code: str, *, is_our_fault: bool) -> Behaviour:
    failed = {"Id": "0", "Code": code, "SenderFault": is_our_fault, "Message": "ada@example.com"}
    return answer(200, json={"Failed": [failed]})


def sns_taken() -> Behaviour:
    return answer(200, body=_sns("Successful", *({"Id": each, "MessageId": "m-1"} for each in ITEMS)))


def sns_failed(code: str, *, is_our_fault: bool) -> Behaviour:
    fault = str(is_our_fault).lower()
    return answer(
        200, body=_sns("Failed", {"Id": "0", "Code": code, "SenderFault": fault, "Message": "ada@example.com"})
    )


def event_entries(body: bytes) -> Sequence[Any]:
    entries: Sequence[Any] = json.loads(body)["Entries"]
    return entries


def event_taken() -> Behaviour:
    """One entry in the answer for each of the request: they have no ids."""

    async def behave(request: Request, writer: asyncio.StreamWriter) -> bool:
        taken = [{"EventId": "e-1"} for _ in event_entries(request.body)]
        return await answer(200, json={"FailedEntryCount": 0, "Entries": taken})(request, writer)

    return behave


def event_failed(code: str, *, is_our_fault: bool) -> Behaviour:
    """The service says in the code alone whose fault it is."""
    failed = {"ErrorCode": code, "ErrorMessage": "ada@example.com"}
    return answer(200, json={"FailedEntryCount": 1, "Entries": [failed]})


def refused(status: int, code: str) -> Behaviour:
    """As services with JSON write an error; for the others see `refused_in_xml`."""
    return answer(status, json={"__type": f"com.amazonaws#{code}", "message": "ada@example.com"})


def refused_in_xml(status: int, code: str) -> Behaviour:
    text = f"<ErrorResponse><Error><Code>{code}</Code><Message>ada@example.com</Message></Error></ErrorResponse>"
    return answer(status, body=text.encode())


def _sns(name: str, *members: Mapping[str, str]) -> bytes:
    listed = "".join(
        f"<member>{''.join(f'<{field}>{text}</{field}>' for field, text in each.items())}</member>" for each in members
    )
    result = f"<PublishBatchResult><{name}>{listed}</{name}></PublishBatchResult>"
    return f"<PublishBatchResponse>{result}</PublishBatchResponse>".encode()
