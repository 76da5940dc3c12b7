"""The fake Stripe, its clock, and the two clients that speak to it."""

from collections.abc import Iterator
from random import Random

import httpx
import pytest
from stripe import StripeClient
from support.stripe_clients import Clock, sdk

from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import RunningStripe, running_stripe


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Iterator[RunningStripe]:
    with running_stripe(clock=clock, random=Random(1)) as service:
        yield service


@pytest.fixture
def client(service: RunningStripe) -> StripeClient:
    return sdk(service.url)


@pytest.fixture
def http(service: RunningStripe) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False) as http:
        yield http
