"""The status lookup of a mail: a search for its Message-ID in a mailbox where every mail is filed.

    sent = ImapSearch(host="imap.example.com", username="shop", password=os.environ["IMAP_PASSWORD"], mailbox="Sent")
    SmtpAdapter(host="smtp.example.com", sender="shop@example.com", find=sent)

Many providers file what their SMTP server accepts under "Sent"; elsewhere a blind copy to an archive does it.
"""

import imaplib
import ssl
from datetime import timedelta

from dispatchers.adapters.trust import trusting
from dispatchers.delivery import Absent, CannotTell, Delivery, Finding, Found
from outbox.errors import ConfigurationError

PORT = 993  # RFC 8314, 3.2: IMAP over TLS


class ImapSearch:
    """Searches one mailbox over IMAP, always over TLS; nothing there is changed, nor marked as seen.

    host, port: the server's. username, password: never shown or logged. mailbox: where each mail is filed.
    files_at_once: the server files a mail before it says that it has accepted it. Only then is a mail that is not there proved
        absent; where a copy takes its way through queues, it may yet come, and a lookup cannot prove that.
    timeout: of each exchange with the server. tls_context: whom to trust.
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
        tls_context: ssl.SSLContext | None = None,
    ) -> None:
        if not (username and password):
            raise ConfigurationError("ImapSearch needs a username and a password (they are not shown)")
        if any(char in mailbox for char in '"\\\r\n'):
            raise ConfigurationError(
                f"mailbox={mailbox!r} cannot be named to a server: without quotes, backslashes or lines"
            )
        self._host = host
        self._port = port
        self._username = username
        self._password = password
        self._mailbox = mailbox
        self._files_at_once = files_at_once
        self._timeout_seconds = timeout.total_seconds()
        self._tls = tls_context or trusting()

    def __repr__(self) -> str:
        return f"ImapSearch({self._host!r}, mailbox={self._mailbox!r})"

    def __call__(self, delivery: Delivery, message_id: str) -> Finding:
        try:
            numbers = self._search(message_id)
        except (imaplib.IMAP4.error, OSError) as error:  # whose texts may quote what we said
            return CannotTell(f"{self._mailbox!r} could not be searched: {type(error).__name__}")
        if numbers:
            return Found({"message_id": message_id, "found_in": self._mailbox})
        return Absent() if self._files_at_once else CannotTell(f"it is not in {self._mailbox!r}, or not yet")

    def _search(self, message_id: str) -> list[bytes]:
        """The numbers of the mails with this Message-ID."""
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
