"""The clients: each repeats one request until it gets a 201, under one Idempotency-Key.

    python -m examples.demo.clients SHOP_URL --orders 300 --results FILE --seed 1

Some hang up after a few milliseconds, whatever the shop is doing then. Some send two requests at the same time, as after a double
click. Each result is written when its checkout is done.
"""

import argparse
import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import IO

import httpx

from examples.demo.checkout_results import CheckoutResult

IMPATIENT = 0.25  # of the first attempts end by the client hanging up
PATIENCE_SECONDS = 10.0
HASTE_SECONDS = (0.001, 0.03)  # a checkout takes about 10 ms, so that some hang up before its commit and some after
RACING = 0.2  # of the checkouts send two requests at the same time
MAX_ATTEMPTS = 30
CARD, NO_FUNDS = "pm_card_visa", "pm_card_chargeDeclinedInsufficientFunds"  # docs.stripe.com/testing


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    key: str
    customer: str
    email: str
    amount: int
    currency: str
    payment_method: str
    racing: bool
    after_seconds: float


def checkouts(orders: int, seconds: float, seed: int, run: str, declined: float = 0) -> list[Checkout]:
    """What the clients want: `orders` of them, spread over `seconds`. declined: the fraction whose card has no funds."""
    random = Random(seed)

    def wish(number: int) -> Checkout:
        customer = random.randint(1, 50)
        return Checkout(
            key=f"{run}-{number:06}",
            customer=f"cus_{customer:03}",
            email=f"customer-{customer}@example.com",
            amount=random.randint(500, 20_000),
            currency=random.choice(["eur", "usd", "chf"]),
            payment_method=NO_FUNDS if random.random() < declined else CARD,
            racing=random.random() < RACING,
            after_seconds=(number + random.random()) * seconds / orders,
        )

    return [wish(number) for number in range(orders)]


async def check_out(http: httpx.AsyncClient, wish: Checkout, random: Random) -> CheckoutResult:
    """Repeat the request until it is answered, from one client or from two at the same time."""
    counts: Counter[str] = Counter()
    asking = [ask(http, wish, random, counts) for _ in range(2 if wish.racing else 1)]
    answers = await asyncio.gather(*asking)
    return CheckoutResult(
        key=wish.key,
        customer=wish.customer,
        email=wish.email,
        amount=wish.amount,
        currency=wish.currency,
        order_ids=sorted({answer for answer in answers if answer is not None}),
        **counts,
    )


async def ask(http: httpx.AsyncClient, wish: Checkout, random: Random, counts: Counter[str]) -> str | None:
    for attempt in range(MAX_ATTEMPTS):
        hasty = attempt < 2 and random.random() < IMPATIENT
        counts["requests"] += 1
        try:
            answer = await http.post(
                "/checkout",
                json={
                    "amount": wish.amount,
                    "currency": wish.currency,
                    "email": wish.email,
                    "payment_method": wish.payment_method,
                },
                headers={"Idempotency-Key": wish.key, "X-Customer": wish.customer},
                timeout=random.uniform(*HASTE_SECONDS) if hasty else PATIENCE_SECONDS,
            )
        except httpx.TimeoutException:
            counts["timeouts"] += 1
        except httpx.TransportError:
            counts["errors"] += 1
            await asyncio.sleep(0.2)
        else:
            match answer.status_code:
                case 201:
                    counts["replays"] += "idempotent-replayed" in answer.headers
                    return str(answer.json()["order_id"])
                case 409:
                    counts["conflicts"] += 1
                    await asyncio.sleep(float(answer.headers["Retry-After"]))
                case _:
                    counts["errors"] += 1
                    await asyncio.sleep(0.5)
    return None


async def run(shop_url: str, wishes: list[Checkout], seed: int, file: IO[str]) -> None:
    async with httpx.AsyncClient(base_url=shop_url, trust_env=False) as http:

        async def one(number: int, wish: Checkout) -> None:
            await asyncio.sleep(wish.after_seconds)
            result = await check_out(http, wish, Random(f"{seed}/{number}"))
            file.write(result.line())
            file.flush()

        async with asyncio.TaskGroup() as group:
            for number, wish in enumerate(wishes):
                group.create_task(one(number, wish))


def main() -> None:
    parser = argparse.ArgumentParser(prog="clients")
    parser.add_argument("shop_url")
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=20, help="time over which the checkouts are spread")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--run", default="demo", help="the beginning of every key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--declined", type=float, default=0, help="the fraction of the cards that have no funds")
    given = parser.parse_args()
    wishes = checkouts(given.orders, given.seconds, given.seed, given.run, given.declined)
    with given.results.open("w") as file:
        asyncio.run(run(given.shop_url, wishes, given.seed, file))


if __name__ == "__main__":
    main()
