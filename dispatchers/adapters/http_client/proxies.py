"""Through which proxy a service is reached: the one that was given, or the environment's."""

import ipaddress
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.request import getproxies

import httpx

from dispatchers.adapters.http_client.request_writer import Origin, Target
from outbox.errors import ConfigurationError

SCHEMES: Final = ("http", "https")
HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+")
EXCEPTION: Final = re.compile(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:]+|.*:.*:.*?))(?::(?P<port>\d{1,5}))?")
"""A part of NO_PROXY. An IPv6 address has a port only after its brackets."""


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the headers that it gets."""

    origin: Origin
    headers: tuple[tuple[str, str], ...] = field(repr=False)

    @classmethod
    def of(cls, url: str, name: str) -> "Proxy":
        """name: of the setting or the variable. Raises `ConfigurationError`, which does not show the URL."""
        try:
            parsed = httpx.URL(url)
            origin = Target.of(parsed).origin
            if parsed.port != 0 and origin.port < 65536 and HOST.fullmatch(origin.host):
                return cls(origin, tuple(_login(parsed)))
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError, TypeError):
            pass
        raise ConfigurationError(f"{name} must be a URL http://HOST:PORT or https://HOST:PORT (it is not shown)")


class Proxies:
    """given: the proxy for all services. Without it, HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY decide, which are read now.

    Raises `ConfigurationError` for a given URL that no proxy can have. One of the environment is refused for the services that
    it concerns.
    """

    def __init__(self, given: str | None) -> None:
        self._given = None if given is None else Proxy.of(given, "proxy")
        named = {} if given is not None else {name: url.strip() for name, url in getproxies().items()}
        self._exceptions = named.get("no", "").replace(",", " ").lower().split()
        self._by_scheme = {scheme: found for scheme in SCHEMES if (found := _for_scheme(scheme, named))}

    def of(self, origin: Origin) -> Proxy | None:
        """The proxy for this service; None for a direct connection, as always to this machine if the environment decides.

        Raises `ConfigurationError` if the environment names a proxy for it that cannot be used.
        """
        if self._given is not None or not self._by_scheme:
            return self._given
        found = self._by_scheme.get(origin.scheme)
        if found is None or _is_loopback(origin.host) or any(_names(each, origin) for each in self._exceptions):
            return None
        if isinstance(found, Unusable):
            raise ConfigurationError(
                f"{found.reason}. {origin} would be reached through it: give the adapter proxy='http://HOST:PORT', set"
                f" {origin.scheme}_proxy, or reach the host without a proxy by NO_PROXY={origin.host}"
            )
        return found


class Unusable(NamedTuple):
    """A proxy of the environment that no adapter can use, and why."""

    reason: str


def _for_scheme(scheme: str, named: Mapping[str, str]) -> Proxy | Unusable | None:
    """The environment's proxy for this scheme. A blank variable counts as unset."""
    kind = scheme if named.get(scheme) else "all"
    url = named.get(kind)
    if not url:
        return None
    name = f"the environment's {_variable(kind)}"
    if url.lower().startswith("socks"):
        return Unusable(f"{name} is a SOCKS proxy, which the adapters cannot use")
    try:
        return Proxy.of(url if "://" in url else f"http://{url}", name)
    except ConfigurationError as error:
        return Unusable(str(error))


def _variable(kind: str) -> str:
    """The name of the variable from which `getproxies` has it: in lower case, which counts first, or in upper case."""
    name = f"{kind}_proxy"
    return name if os.environ.get(name) else name.upper()


def _names(exception: str, origin: Origin) -> bool:
    """Whether this part of NO_PROXY names the service: `*`, a host, a domain, an address or a network; perhaps with a port."""
    if exception == "*":
        return True
    found = EXCEPTION.fullmatch(exception)
    if found is None or int(found["port"] or origin.port) != origin.port:
        return False
    host = (found["bracketed"] or found["host"]).removeprefix("*").removeprefix(".")
    if host == origin.host or origin.host.endswith(f".{host}"):
        return True
    try:
        return ipaddress.ip_address(origin.host) in ipaddress.ip_network(host, strict=False)
    except ValueError:
        return False


def _login(url: httpx.URL) -> list[tuple[str, str]]:
    if not url.userinfo:
        return []
    credentials = b64encode(f"{url.username}:{url.password}".encode()).decode()
    return [("Proxy-Authorization", f"Basic {credentials}")]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
