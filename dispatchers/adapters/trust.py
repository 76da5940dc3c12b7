"""Whom the adapters trust: a given TLS context or file, the environment's authorities, or the usual ones."""

import os
import ssl
from functools import cache
from pathlib import Path
from typing import TypeAlias

from outbox.errors import ConfigurationError

Tls: TypeAlias = ssl.SSLContext | str | os.PathLike[str] | None
"""A context, or the path of a file or directory of authorities. None: SSL_CERT_FILE, SSL_CERT_DIR, or the usual authorities."""


@cache
def trusting() -> ssl.SSLContext:
    """For mail: the system's authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR, which OpenSSL reads itself.

    The adapters of a process share it, and none changes it: to read the authorities takes longer than to send.
    """
    return ssl.create_default_context()


def given_context(tls: Tls) -> ssl.SSLContext | None:
    """The context that was given, or one with the given authorities; None without either. For protocols other than HTTP."""
    return tls if tls is None or isinstance(tls, ssl.SSLContext) else _of_path(os.fspath(tls), "tls")


def for_http(tls: Tls, usual: str | None = None) -> ssl.SSLContext:
    """The context for HTTPS. A given context is used as it is. usual: a file of authorities; by default those of httpx.

    Raises `ConfigurationError` for a path without authorities.
    """
    if isinstance(tls, ssl.SSLContext):
        return tls
    if tls is not None:
        return _http_of_path(os.fspath(tls), "tls")
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if path := os.environ.get(name):
            return _http_of_path(path, f"the environment's {name}")
    return _usual(usual)


def _of_path(path: str, name: str) -> ssl.SSLContext:
    try:
        is_directory = Path(path).is_dir()
        context = ssl.create_default_context(
            cafile=None if is_directory else path, capath=path if is_directory else None
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{name}={path!r} is no file or directory of CA certificates ({error})") from error
    return context


@cache
def _http_of_path(path: str, name: str) -> ssl.SSLContext:
    return _speaking_http_1(_of_path(path, name))


@cache
def _usual(path: str | None) -> ssl.SSLContext:
    import httpx  # brokers and mail do without it

    made = httpx.create_ssl_context(trust_env=False) if path is None else ssl.create_default_context(cafile=path)
    return _speaking_http_1(made)


def _speaking_http_1(context: ssl.SSLContext) -> ssl.SSLContext:
    """Only for a context that was made here: a given one may be used for other protocols too."""
    context.set_alpn_protocols(["http/1.1"])
    return context
