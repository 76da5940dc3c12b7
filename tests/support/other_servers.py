"""Servers that call themselves otherwise than PostgreSQL and MariaDB do."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

Talk = Callable[[socket.socket], None]


@contextmanager
def calling_itself(server: sa.URL, **parameters: str) -> Iterator[sa.URL]:
    """The PostgreSQL `server` behind a proxy that changes the parameters which it reports to a new connection, or adds them."""

    def talk(client: socket.socket) -> None:
        with _connected(server) as far, far.makefile("rb") as answers:
            threading.Thread(target=_copy, args=(client, far), daemon=True).start()
            reported = dict(parameters)
            while (kind := answers.read(1)) != b"Z":
                body = answers.read(int.from_bytes(answers.read(4)) - 4)
                name = body.split(b"\0")[0].decode() if kind == b"S" else ""
                if name in reported:
                    body = f"{name}\0{reported.pop(name)}\0".encode()
                client.sendall(_message(kind, body))
            added = [_message(b"S", f"{name}\0{value}\0".encode()) for name, value in reported.items()]
            client.sendall(b"".join(added) + kind)
            while chunk := answers.read1(65536):
                client.sendall(chunk)

    with _listening(talk) as port:
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        yield server.difference_update_query(["host", "port"]).set(host="127.0.0.1", port=port).update_query_dict(plain)


@contextmanager
def mysql_calling_itself(version: str) -> Iterator[int]:
    """The port of a server that greets in MySQL's protocol, and answers everything with OK."""
    greeting = (
        b"\x0a" + version.encode() + b"\0" + (1).to_bytes(4, "little") + b"saltsalt\0" + b"\xff\xf7" + b"\x2d\x02\0"
        b"\xff\x81\x15" + bytes(10) + b"saltsaltsalt\0" + b"mysql_native_password\0"
    )

    def talk(client: socket.socket) -> None:
        client.sendall(len(greeting).to_bytes(3, "little") + b"\0" + greeting)
        with client.makefile("rb") as asked:
            while head := asked.read(4):
                asked.read(int.from_bytes(head[:3], "little"))
                client.sendall(b"\x07\0\0" + bytes([(head[3] + 1) % 256]) + b"\0\0\0\x02\0\0\0")

    with _listening(talk) as port:
        yield port


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _connected(server: sa.URL) -> socket.socket:
    folder = server.query.get("host")
    if isinstance(folder, str):
        far = socket.socket(socket.AF_UNIX)
        far.connect(f"{folder}/.s.PGSQL.{server.query.get('port') or server.port or 5432}")
        return far
    return socket.create_connection((server.host or "127.0.0.1", server.port or 5432))


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def _listening(talk: Talk) -> Iterator[int]:
    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):
            talk(client)
            client.shutdown(socket.SHUT_RDWR)  # else a thread that still reads would keep it open

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
