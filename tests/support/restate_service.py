"""The handlers that the tests of RestateAdapter start. Each run is a line in the file that the environment names."""

import os
from typing import Any

import restate

orders = restate.Service("orders")
customers = restate.VirtualObject("Customer")
shipments = restate.Workflow("Shipment")


def note(ctx: Any, what: str, key: str, order: dict[str, Any]) -> None:
    with open(os.environ["RUNS"], "a") as runs:
        runs.write("\t".join((what, key, order["number"], ctx.request().id)) + "\n")


@orders.handler()
async def fulfil(ctx: restate.Context, order: dict[str, Any]) -> str:
    note(ctx, "orders/fulfil", "-", order)
    return "done"


@orders.handler()
async def wait(ctx: restate.Context, order: dict[str, Any]) -> None:
    await ctx.awakeable()[1]  # which nothing resolves


@orders.handler()
async def fail(ctx: restate.Context, order: dict[str, Any]) -> None:
    raise restate.TerminalError("invocation not found", status_code=404)


@customers.handler()
async def greet(ctx: restate.ObjectContext, order: dict[str, Any]) -> None:
    note(ctx, "Customer/greet", ctx.key(), order)


@shipments.main()
async def run(ctx: restate.WorkflowContext, order: dict[str, Any]) -> None:
    note(ctx, "Shipment/run", ctx.key(), order)


app = restate.app([orders, customers, shipments])
