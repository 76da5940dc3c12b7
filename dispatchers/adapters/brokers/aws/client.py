"""One client of boto3, called on a few threads. It neither repeats a request nor sends one too late."""

import asyncio
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from dispatchers.adapters.brokers.aws.answers import NotBegun
from dispatchers.steady_clock import steady_clock
from dispatchers.threads import Threads
from outbox.errors import ConfigurationError

CONNECT_SHARE: Final = 0.25  # of the timeout
READ_SHARE: Final = 0.5
BEGIN_SHARE: Final = 0.2  # the rest is for a busy machine


class AwsClient:
    """Calls one service. boto3 finds the credentials; they are never shown.

    boto3_session: a `boto3.Session`; by default a new one.
    Raises `ConfigurationError` without a region, and for settings that boto3 does not take.
    """

    def __init__(
        self,
        service: str,
        *,
        timeout: timedelta,
        boto3_session: Any,
        endpoint_url: str | None,
        max_threads: int,
    ) -> None:
        if not isinstance(max_threads, int) or max_threads < 1:
            raise ConfigurationError(f"max_threads={max_threads!r} must be an int of at least 1")
        seconds = timeout.total_seconds()
        self._begin_seconds = seconds * BEGIN_SHARE
        config = Config(
            connect_timeout=seconds * CONNECT_SHARE,
            read_timeout=seconds * READ_SHARE,
            max_pool_connections=max_threads,
            retries={"mode": "standard", "total_max_attempts": 1},
            proxies={},  # those of the environment are ignored
        )
        try:
            session = boto3_session or boto3.Session()
            self._client = session.client(service, endpoint_url=endpoint_url, config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"boto3 cannot make a client for {service}: {error}") from error
        self._client.meta.events.register("before-send", self._check_time)
        self._present = threading.local()
        self._threads = Threads(max_threads, f"outbox-{service}")

    @property
    def region(self) -> str:
        return str(self._client.meta.region_name)

    @property
    def operations(self) -> list[str]:
        """The names of the service's methods."""
        return sorted(self._client.meta.method_to_api_mapping)

    def model_of(self, operation: str) -> Any:
        """botocore's model of a method."""
        return self._client.meta.service_model.operation_model(self._client.meta.method_to_api_mapping[operation])

    async def call(self, operation: str, deadline: float, parameters: Mapping[str, Any]) -> Any:
        """The answer. deadline: on the event loop's clock. Raises what boto3 raises, and `NotBegun`."""
        seconds = deadline - asyncio.get_running_loop().time()
        began = steady_clock()
        return await asyncio.wrap_future(self._threads.submit(self._call, operation, began + seconds, parameters))

    def close(self) -> None:
        """Close the connections. A later call opens others."""
        self._client.close()

    def _call(self, operation: str, deadline: float, parameters: Mapping[str, Any]) -> Any:
        self._present.latest = deadline - self._answer_seconds
        return getattr(self._client, operation)(**parameters)

    @property
    def _answer_seconds(self) -> float:
        return self._begin_seconds * (CONNECT_SHARE + READ_SHARE) / BEGIN_SHARE

    def _check_time(self, **about: Any) -> None:
        """Called by botocore before it sends: after the wait for a thread, and after it has fetched credentials."""
        if steady_clock() > self._present.latest:
            raise NotBegun
