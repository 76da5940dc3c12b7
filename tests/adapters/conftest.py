"""What several tests of the HTTP adapters need."""

import pytest

import dispatchers.adapters.http_client.pool


@pytest.fixture
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections be used again at once, in tests that count them."""
    monkeypatch.setattr(dispatchers.adapters.http_client.pool, "REST_SECONDS", 0.0)
