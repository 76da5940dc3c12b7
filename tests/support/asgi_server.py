"""An ASGI app in a real server, on a thread of the test's process."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn


@contextmanager
def serving_asgi(app: Any) -> Iterator[str]:
    """The app's base URL, while it is served."""
    listener = socket.create_server(("127.0.0.1", 0))  # listens already: a client may connect before the thread runs
    server = _Server(app)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stopped.set_result(None)
        thread.join()


class _Server(uvicorn.Server):
    """Stops at once. Uvicorn's own loop checks every 100 ms whether it is to stop, and then pauses as long."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", ws="none", log_level="critical"))
        self.stopped: Future[None] = Future()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # the Date header of its answers
        await asyncio.wrap_future(self.stopped)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while tasks := self.server_state.tasks:  # the requests in flight
            await asyncio.wait(list(tasks))
