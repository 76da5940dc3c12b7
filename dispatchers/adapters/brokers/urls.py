"""The URLs of a broker's servers, checked. No error shows one, because it may contain a password."""

from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from outbox.errors import ConfigurationError


def checked_urls(urls: str | Sequence[str], schemes: Collection[str], *, example: str) -> list[str]:
    """The URLs as a list. Raises `ConfigurationError` for an empty one, and for a URL with another scheme."""
    given = [urls] if isinstance(urls, str) else list(urls)
    for number, url in enumerate(given):
        if not isinstance(url, str) or urlsplit(url).scheme not in schemes:
            raise ConfigurationError(f"urls[{number}] must be a URL such as {example} (it is not shown)")
    if not given:
        raise ConfigurationError(f"urls=[] must name one server at least, such as {example}")
    return given
