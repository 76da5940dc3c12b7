"""`dispatchers` hands out its names when they are asked for, and loads nothing before."""

import subprocess
import sys

import pytest

import dispatchers
import dispatchers.callbacks
import dispatchers.delivery
import dispatchers.errors
import dispatchers.flow_control.state
import dispatchers.operations
import dispatchers.periodic.schedules
import dispatchers.process.dispatcher
import dispatchers.process.fleet
import dispatchers.time_limits


def test_importing_the_package_loads_neither_sqlalchemy_nor_the_outbox() -> None:
    program = "import sys, dispatchers; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert "dispatchers" in loaded
    assert not {"sqlalchemy", "outbox", "dispatchers.process.dispatcher"} & set(loaded)


def test_a_dispatcher_loads_no_broker_dashboard_fleet_or_testing_tool() -> None:
    """They could leave the distribution; `pyproject.toml` has the contract on imports that are written at a module's head."""
    program = (
        "import sys, dispatchers.admin.check.doctor, dispatchers.cli.run, outbox.testing; from dispatchers import Dispatcher;"
        " from dispatchers.adapters import HttpAdapter, MemoryAdapter, SmtpAdapter, StripeAdapter; print(*sys.modules)"
    )

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    apart = ("adapters.brokers", "adapters.workflows", "dashboard", "process.fleet", "testing")
    assert "dispatchers.adapters.stripe.adapter" in loaded
    assert [name for name in loaded if name.removeprefix("dispatchers.").startswith(apart)] == []


def test_every_public_name_is_that_of_its_module() -> None:
    homes = (
        dispatchers.callbacks,
        dispatchers.delivery,
        dispatchers.errors,
        dispatchers.process.dispatcher,
        dispatchers.process.fleet,
        dispatchers.operations,
        dispatchers.periodic.schedules,
        dispatchers.flow_control.state,
        dispatchers.time_limits,
    )

    for name in dispatchers.__all__:
        (found,) = {id(getattr(home, name)) for home in homes if hasattr(home, name)}
        assert id(getattr(dispatchers, name)) == found
    assert dir(dispatchers) == sorted(dispatchers.__all__)


def test_a_star_import_brings_them_all() -> None:
    names: dict[str, object] = {}

    exec("from dispatchers import *", names)

    assert set(dispatchers.__all__) <= names.keys()


def test_a_name_that_there_is_not_is_an_error_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'dispatchers' has no attribute 'Worker'"):
        _ = dispatchers.Worker  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Worker' from 'dispatchers'"):
        exec("from dispatchers import Worker", {})
