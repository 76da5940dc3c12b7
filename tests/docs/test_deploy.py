"""The recipes of examples/deploy: each file fits its tool, and the commands of the image run as the compose file gives them."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml
from support.docs_pages import ROOT
from support.free_ports import free_ports
from support.installs import Environments
from support.mail_servers import running_mailbox
from support.migrations import Database

from dispatchers.cli.run import run as run_command
from dispatchers.process.daemon import CLOSE_SECONDS, LATE_SECONDS, SETTLE_SECONDS
from dispatchers.settings import Settings
from dispatchers.testing.stripe_core import API_KEY
from dispatchers.testing.stripe_service import running_stripe

pytest_plugins = ["support.blank_databases"]

DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "systemd" / "shop-dispatcher.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFESTS = [
    manifest
    for file in ("app.yaml", "dispatcher.yaml", "migrate.yaml")
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())
]
MAX_SECONDS = 60
KUBERNETES = "1.31"  # the oldest that has each field: `sleep` of a preStop hook


def manifest(kind: str, name: str) -> Any:
    (found,) = [each for each in MANIFESTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


# --- what each tool checks


@pytest.mark.parametrize("given", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_a_manifest_fits_the_schema_of_kubernetes(given: Any) -> None:
    kubernetes_validate.validate(given, KUBERNETES, strict=True)


def test_the_unit_is_accepted_and_hardened(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "shop-dispatcher.service"
    unit.write_text(re.sub(r"/srv/shop/venv/bin/outbox", "/bin/true", UNIT))

    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    security = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stderr) == (0, "")
    assert float(re.search(r"exposure level for .*: ([\d.]+)", security.stdout)[1]) < 2  # type: ignore[index]


def test_kustomize_joins_the_manifests_and_renames_the_secret(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder)

    def names(secret: str) -> set[str]:
        (folder / "outbox.env").write_text(f"OUTBOX_SECRET={secret}\n")
        built = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
        return set(re.findall(r"name: (outbox-\w+)", built.stdout))

    first, second = names("k1:one"), names("k2:two,k1:one")

    assert len(first) == len(second) == 1, "the pods and the secret have one name"
    assert first != second, "a new secret starts new pods"


# --- what the recipes say of the dispatcher


def test_the_example_of_the_secret_names_each_variable_of_the_shop() -> None:
    """Without a login at the mail server the shop would send its mails unencrypted."""
    lines = (DEPLOY / "kubernetes" / "outbox.env.example").read_text().splitlines()
    shop = ROOT / "examples" / "fastapi_shop"
    texts = [(shop / name).read_text() for name in ("app.py", "effects.py", "orders.py")]

    read = {name for text in texts for name in re.findall(r'"([A-Z_]+)"(?=\]|\)| in os\.environ)', text)}

    given = {line.partition("=")[0] for line in lines}
    assert read - {"STRIPE_URL"} == given - {"OUTBOX_ENV", "OUTBOX_SECRET"}


def test_each_supervisor_waits_longer_than_the_dispatcher_drains() -> None:
    drains = Settings().grace + timedelta(seconds=LATE_SECONDS + SETTLE_SECONDS + CLOSE_SECONDS)
    waits = {
        "compose": COMPOSE["services"]["dispatcher"]["stop_grace_period"].removesuffix("s"),
        "kubernetes": manifest("Deployment", "dispatcher")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        "systemd": re.search(r"TimeoutStopSec=(\d+)", UNIT)[1],  # type: ignore[index]
    }

    assert {where: int(seconds) > drains.total_seconds() for where, seconds in waits.items()} == dict.fromkeys(
        waits, True
    )


def test_each_recipe_runs_the_dispatcher_with_options_that_exist() -> None:
    commands = [
        *re.findall(r'^CMD \["outbox", "run", (.*)\]$', DOCKERFILE, re.M),
        *re.findall(r"^ExecStart=\S+/outbox run (.*)$", UNIT, re.M),
        " ".join(manifest("Deployment", "dispatcher")["spec"]["template"]["spec"]["containers"][0]["args"][2:]),
    ]

    assert len(commands) == 3
    for command in commands:
        arguments = [part.strip('",') for part in command.split()]
        given = [part for part in arguments if part != "--json"]  # an option of every command
        run_command.make_context("run", given)


def test_probes_and_the_monitor_use_a_port_that_the_dispatcher_serves() -> None:
    (container,) = manifest("Deployment", "dispatcher")["spec"]["template"]["spec"]["containers"]
    monitor = yaml.safe_load((DEPLOY / "kubernetes" / "podmonitor.yaml").read_text())
    (port,) = container["ports"]

    assert f"0.0.0.0:{port['containerPort']}" in container["args"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]


# --- the image's commands


def test_the_image_serves_an_order_and_drains(
    blank_postgresql: Database, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The packages are those that the Dockerfile installs, and the commands and variables those of the compose file."""
    (extras,) = re.findall(r'"/src(\[.*?\])"', DOCKERFILE)
    with ExitStack() as stack:
        made = stack.enter_context(closing(Environments(tmp_path_factory.mktemp("image"))))
        python = made.make(f"'sqlalchemy-outbox{extras}' uvicorn").python
        mails, smtp_port = stack.enter_context(running_mailbox())
        stripe = stack.enter_context(running_stripe())
        image = Image(python.parent, tmp_path, COMPOSE["x-shop"]["environment"])
        image.variables |= {
            "DATABASE_URL": blank_postgresql.url.render_as_string(hide_password=False),
            "OUTBOX_SECRET": f"k1:{base64.b64encode(bytes(32)).decode()}",
            "STRIPE_API_KEY": API_KEY,
            "STRIPE_URL": stripe.url,
            "SMTP_HOST": "127.0.0.1",
            "SMTP_PORT": str(smtp_port),
        }

        assert image.start("migrate").wait(MAX_SECONDS) == 0, image.output
        app, dispatcher = stack.enter_context(image.start("app")), stack.enter_context(image.start("dispatcher"))
        stack.callback(dispatcher.kill)
        stack.callback(app.kill)
        for service in ("app", "dispatcher"):
            image.wait_for(partial(image.is_healthy, service))
        order = image.place_order()
        image.wait_for(lambda: image.state_of(order) == "paid" and mails.contents)
        dispatcher.terminate()

        assert dispatcher.wait(MAX_SECONDS) == 0, image.output

    assert len(stripe.ledger.charges) == 1


class Image:
    """Runs the services of the compose file as its image would: with these packages, variables and files."""

    def __init__(self, programs: Path, folder: Path, variables: Mapping[str, str]) -> None:
        self.variables = {**variables, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        self._folder, self._log = folder, folder / "log"
        self._ports = dict(zip(("8000", "9464"), map(str, free_ports(2)), strict=True))
        shutil.copytree(ROOT / "examples" / "fastapi_shop", folder / "examples" / "fastapi_shop")

    @property
    def output(self) -> str:
        return self._log.read_text()

    def start(self, service: str) -> "subprocess.Popen[bytes]":
        (default,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)
        return self._start(COMPOSE["services"][service].get("command") or json.loads(default))

    def is_healthy(self, service: str) -> bool:
        """Whether the service's own check succeeds."""
        _, *command = COMPOSE["services"][service]["healthcheck"]["test"]
        with self._start(command) as check:
            return check.wait() == 0

    def place_order(self) -> str:
        """Sends the same request twice, and returns where its order is."""
        with self._client() as client:
            key = {"Idempotency-Key": "cart-1"}
            answers = [
                client.post("/orders", json={"email": "ada@example.com", "amount": 2000}, headers=key) for _ in range(2)
            ]
        assert [answer.status_code for answer in answers] == [201, 201], self.output
        assert answers[0].headers["Location"] == answers[1].headers["Location"]
        return answers[0].headers["Location"]

    def state_of(self, order: str) -> str:
        with self._client() as client:
            return str(client.get(order).json()["state"])

    def wait_for(self, condition: Callable[[], Any]) -> None:
        latest = time.monotonic() + MAX_SECONDS
        while not condition():
            assert time.monotonic() < latest, self.output
            time.sleep(0.1)

    def _client(self) -> httpx.Client:
        url = f"http://127.0.0.1:{self._ports['8000']}"
        return httpx.Client(base_url=url, headers={"Authorization": "Bearer ada-token"}, trust_env=False)

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """The container's ports are this test's own, and its addresses those of loopback."""
        given = [self._at_own_port(part) for part in command]
        with self._log.open("ab") as log:
            return subprocess.Popen(given, cwd=self._folder, env=self.variables, stdout=log, stderr=log)

    def _at_own_port(self, part: str) -> str:
        for port, own in self._ports.items():
            part = re.sub(rf"\b{port}\b", own, part)
        return part.replace("0.0.0.0", "127.0.0.1")
