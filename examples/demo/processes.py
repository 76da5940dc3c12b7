"""The demo's processes, each with its arguments: the two services, the shop, the dispatcher, the clients and the dashboard."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from dispatchers.testing.stripe_core import API_KEY
from examples.demo.children import Child, Children
from examples.demo.files import Files

DASHBOARD_PORT = 8460


class Processes:
    """Starts each of them, and gives it the addresses of those that were started before.

    environment: the database and the secret. The variables that `start_...` adds are for the processes that come later.
    """

    def __init__(self, started: Children, environment: Mapping[str, str], files: Files, *, seed: int) -> None:
        self._children = started
        self.environment = dict(environment)
        self._files = files
        self._seed = seed
        self.shop_url = ""

    def start_payment_service(self, misbehaviour: Mapping[str, float], *, window_hours: float | None = None) -> Child:
        """window_hours: how long the service remembers a key. None: as long as Stripe does."""
        arguments = ["--port", "0", *self._service_arguments(misbehaviour, self._files.payments)]
        if window_hours is not None:
            arguments += ["--window-hours", str(window_hours)]
        service = self._children.start("payment-service", "dispatchers.testing.stripe_service", arguments)
        self.environment["STRIPE_URL"] = f"http://127.0.0.1:{service.first_line()}"
        self.environment["STRIPE_API_KEY"] = API_KEY
        return service

    def start_mail_service(self, misbehaviour: Mapping[str, float]) -> Child:
        arguments = ["postmark", *self._service_arguments(misbehaviour, self._files.mails)]
        service = self._children.start("mail-service", "dispatchers.testing.provider_service", arguments)
        self.environment["MAIL_URL"] = f"http://127.0.0.1:{service.first_line()}"
        return service

    def start_shop(self) -> Child:
        shop = self._children.start("shop", "examples.demo.shop", environment=self.environment)
        self.shop_url = f"http://127.0.0.1:{shop.first_line()}"
        return shop

    def start_dispatcher(self, effects: str = "examples.demo.effects") -> Child:
        return self._children.start(
            "dispatcher", "dispatchers", ["run", f"{effects}:make_dispatcher"], self.environment
        )

    def start_clients(self, orders: int, seconds: float, options: Sequence[str] = ()) -> Child:
        arguments = [self.shop_url, "--orders", str(orders), "--seconds", str(seconds)]
        arguments += ["--seed", str(self._seed), "--run", uuid.uuid4().hex[:12]]
        arguments += ["--results", str(self._files.results), *options]
        return self._children.start("clients", "examples.demo.clients", arguments)

    def start_dashboard(self) -> tuple[Child, str]:
        """Start the dashboard on its usual port, or on another one if that is in use. Returns its address too."""
        for port in (DASHBOARD_PORT, 0):
            arguments = ["web", "--port", str(port), "--authenticate", "examples.demo.operators:authenticate"]
            dashboard = self._children.start("dashboard", "dispatchers", arguments, self.environment)
            if address := dashboard.logged(r"running on (http://\S+)"):
                return dashboard, f"{address}/"
        raise dashboard.died()

    def _service_arguments(self, misbehaviour: Mapping[str, float], ledger: Path) -> list[str]:
        """The arguments that both services take."""
        arguments = ["--seed", str(self._seed), "--ledger", str(ledger)]
        for name, value in misbehaviour.items():
            arguments += [name, str(value)]
        return arguments
