"""A mail that may have been sent, looked up by its Message-ID: by a user's function, and in a mailbox over IMAP."""

import asyncio
import re
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from support.mail_servers import KEY, adapter_for, delivery, tls_contexts

from dispatchers import Absent, CannotTell, Found
from dispatchers.adapters import ImapSearch
from outbox.errors import ConfigurationError

MESSAGE_ID = f"<{KEY}@example.com>"


class Imap(socketserver.ThreadingTCPServer):
    """Speaks as much of IMAP4rev1 (RFC 3501) as a search needs. broken: the command that it refuses, or breaks off at."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext, *filed: str, refusing: str = "", breaking_off: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.tls = tls
        self.filed = filed
        self.refusing = refusing
        self.breaking_off = breaking_off
        self.commands: list[str] = []


class _Session(socketserver.BaseRequestHandler):
    server: Imap

    def handle(self) -> None:
        try:
            with (
                self.server.tls.wrap_socket(self.request, server_side=True) as connection,
                connection.makefile("rwb", buffering=0) as stream,
            ):
                self._talk(stream)
        except OSError:
            pass  # the client did not like our certificate, or went away

    def _talk(self, stream: Any) -> None:
        stream.write(b"* OK [CAPABILITY IMAP4rev1] ready\r\n")
        for line in iter(stream.readline, b""):
            tag, command = line.decode().rstrip("\r\n").split(" ", 1)
            self.server.commands.append(command)
            word = command.split()[0].upper()
            if word == self.server.breaking_off:
                return
            if word == self.server.refusing:
                stream.write(f"{tag} NO not for {command}\r\n".encode())
                continue
            stream.write(self._untagged(word, command) + f"{tag} OK done\r\n".encode())

    def _untagged(self, word: str, command: str) -> bytes:
        match word:
            case "CAPABILITY":
                return b"* CAPABILITY IMAP4rev1\r\n"
            case "EXAMINE":
                return b"* 2 EXISTS\r\n"
            case "SEARCH":
                wanted = re.fullmatch(r'SEARCH HEADER Message-ID "(.*)"', command)
                found = [
                    str(number) for number, each in enumerate(self.server.filed, 1) if wanted and wanted[1] == each
                ]
                return f"* SEARCH {' '.join(found)}\r\n".encode()
        return b""


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return tls_contexts(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def serving(contexts: Any) -> Callable[..., Any]:
    @contextmanager
    def running(*filed: str, **broken: str) -> Iterator[Imap]:
        with Imap(contexts[0], *filed, **broken) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()

    return running


def search(server: Imap, contexts: Any, **settings: Any) -> Any:
    given = {"username": "shop", "password": "sesame", "port": server.server_address[1], "tls": contexts[1]}
    return look(ImapSearch(host="127.0.0.1", **{**given, **settings}))


def look(find: Any, **fields: Any) -> Any:
    async def main() -> Any:
        adapter: Any = adapter_for(25, find=find)
        return await adapter.find(delivery(**fields))

    return asyncio.run(main())


# --- any function


def test_a_function_gets_the_message_id_under_which_the_mail_was_sent() -> None:
    asked = []

    def find(delivery: Any, message_id: str) -> Any:
        asked.append((delivery.key, message_id))
        return Found()

    async def find_async(delivery: Any, message_id: str) -> Any:
        return find(delivery, message_id)

    assert [look(find), look(find_async)] == [Found(), Found()]
    assert asked == [(KEY, MESSAGE_ID)] * 2


def test_what_was_no_mail_cannot_be_looked_up() -> None:
    finding = look(lambda delivery, message_id: Absent(), payload={"subject": "to no address"})

    assert isinstance(finding, CannotTell)


def test_without_a_function_smtp_cannot_be_looked_at() -> None:
    assert adapter_for(25).find is None


# --- a mailbox


def test_a_mail_that_was_filed_is_found(contexts: Any, serving: Any) -> None:
    with serving("<other@example.com>", MESSAGE_ID) as server:
        finding = search(server, contexts, mailbox="All Mail")

    assert finding == Found({"message_id": MESSAGE_ID, "found_in": "All Mail"})
    assert 'EXAMINE "All Mail"' in server.commands  # read only


def test_a_mail_that_was_not_filed_may_be_on_its_way(contexts: Any, serving: Any) -> None:
    with serving("<other@example.com>") as server:
        finding = search(server, contexts)

    assert finding == CannotTell("the mail is not in 'Sent', or not yet")


def test_where_mails_are_filed_at_once_what_is_not_there_was_not_sent(contexts: Any, serving: Any) -> None:
    with serving() as server:
        assert search(server, contexts, files_at_once=True) == Absent()


@pytest.mark.parametrize(
    "broken",
    [
        {"refusing": "LOGIN"},
        {"refusing": "EXAMINE"},
        {"refusing": "SEARCH"},
        {"breaking_off": "LOGIN"},
        {"breaking_off": "EXAMINE"},
        {"breaking_off": "SEARCH"},
    ],
    ids=str,
)
def test_a_server_that_fails_proves_nothing(contexts: Any, serving: Any, broken: Any) -> None:
    with serving(**broken) as server:
        finding = search(server, contexts, files_at_once=True)

    assert isinstance(finding, CannotTell)
    assert "sesame" not in finding.reason


def test_an_invalid_certificate_proves_nothing_and_gets_no_password(contexts: Any, serving: Any) -> None:
    with serving() as server:
        finding = search(server, contexts, files_at_once=True, tls=ssl.create_default_context())

    assert finding == CannotTell("'Sent' could not be searched: SSLCertVerificationError")
    assert server.commands == []


def test_an_unreachable_server_proves_nothing(contexts: Any) -> None:
    find = ImapSearch(
        host="127.0.0.1", port=1, username="shop", password="sesame", files_at_once=True, timeout=timedelta(seconds=5)
    )

    assert look(find) == CannotTell("'Sent' could not be searched: ConnectionRefusedError")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"password": ""}, "ImapSearch needs a username and a password (they are not shown)"),
        ({"mailbox": 'Se"nt'}, "mailbox='Se\"nt' must not contain quotes"),
    ],
)
def test_bad_settings_are_refused(settings: Any, shown: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ImapSearch(**{"host": "imap.example.com", "username": "shop", "password": "sesame", **settings})

    assert shown in str(refused.value)


def test_its_password_is_not_shown() -> None:
    assert "sesame" not in repr(ImapSearch(host="imap.example.com", username="shop", password="sesame"))
