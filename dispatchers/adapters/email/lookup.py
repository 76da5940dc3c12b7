"""The status lookup of a mail: search for its Message-ID in a mailbox that contains every mail.

    sent = ImapSearch(host="imap.example.com", username="shop", password=os.environ["IMAP_PASSWORD"], mailbox="Sent")
    SmtpAdapter(host="smtp.example.com", sender="shop@example.com", find=sent)

Many providers store what their SMTP server accepts in "Sent". With other providers, send a blind copy to an archive.
"""

import imaplib
from datetime import timedelta

from dispatchers.adapters.trust import Tls, given_context, trusting
from dispatchers.delivery import Absent, CannotTell, Delivery, Finding, Found
from outbox.errors import ConfigurationError

PORT = 993  # RFC 8314, 3.2: IMAP over TLS


class ImapSearch:
    """Searches one mailbox over IMAP, always over TLS. It changes nothing there, and marks nothing as seen.

    host, port: the IMAP server's.
    username, password: never shown or logged.
    mailbox: the mailbox in which the server stores each mail.
    files_at_once: True if the server stores a mail there before it accepts the mail. Only then does a missing mail prove that
        it was not sent. If copies pass through queues, a mail may still arrive there, and a lookup cannot prove absence.
    timeout: of each exchange with the server.
    tls: as in `HttpAdapter`; by default the system's authorities.
    """

    def __init__(
        self,
        *,
        host: str,
        username: str,
        password: str,
        port: int = PORT,
        mailbox: str = "Sent",
        files_at_once: bool = False,
        timeout: timedelta = timedelta(seconds=10),
        tls: Tls = None,
    ) -> None:
        if not (username and password):
            raise ConfigurationError("ImapSearch needs a username and a password (they are not shown)")
        if any(char in mailbox for char in '"\\\r\n'):
            raise ConfigurationError(f"mailbox={mailbox!r} must not contain quotes, backslashes or line breaks")
        self._host = host
        self._port = port
        self._username = username
        self._password = password
        self._mailbox = mailbox
        self._files_at_once = files_at_once
        self._timeout_seconds = timeout.total_seconds()
        self._tls = given_context(tls) or trusting()

    def __repr__(self) -> str:
        return f"ImapSearch({self._host!r}, mailbox={self._mailbox!r})"

    def __call__(self, delivery: Delivery, message_id: str) -> Finding:
        try:
            numbers = self._search(message_id)
        except (imaplib.IMAP4.error, OSError) as error:  # their texts may quote the commands
            return CannotTell(f"{self._mailbox!r} could not be searched: {type(error).__name__}")
        if numbers:
            return Found({"message_id": message_id, "found_in": self._mailbox})
        return Absent() if self._files_at_once else CannotTell(f"the mail is not in {self._mailbox!r}, or not yet")

    def _search(self, message_id: str) -> list[bytes]:
        connection = imaplib.IMAP4_SSL(self._host, self._port, ssl_context=self._tls, timeout=self._timeout_seconds)
        try:
            connection.login(self._username, self._password)
            _require_ok(connection.select(f'"{self._mailbox}"', readonly=True)[0])
            status, found = connection.search(None, "HEADER", "Message-ID", f'"{message_id}"')
            _require_ok(status)
            return found[0].split() if found and found[0] else []
        finally:
            connection.shutdown()


def _require_ok(status: str) -> None:
    if status != "OK":
        raise imaplib.IMAP4.error
