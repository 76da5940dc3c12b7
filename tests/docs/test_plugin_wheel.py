"""The plugin as a new user has it: the wheel in a new environment, with the oldest pytest that it supports."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.docs_pages import ROOT
from support.installs import UV, build, run
from support.plugin_shop import SHOP

OLDEST = "8.0.0"
TEST = """
    from shop import place

    def test_an_order_is_charged_once(outbox_session, outbox_drain, fake_stripe):
        place(outbox_session, 1)
        outbox_session.commit()
        assert [entry.state for entry in outbox_drain()] == ["delivered", "delivered"]
        assert len(fake_stripe.ledger.charges) == 1

    def test_shown(outbox_session, assert_enqueued):
        place(outbox_session, 1)
        assert_enqueued("stripe.payment_intents.create", {"amount": 1})
"""


def test_the_wheel_brings_the_plugin_to_the_oldest_pytest(tmp_path: Path) -> None:
    home = tmp_path / "environment"
    run(UV, "venv", "--quiet", "--python", sys.executable, str(home))
    wheel = build("wheel", ROOT, tmp_path / "wheel")
    install = [UV, "pip", "install", "--quiet", "--link-mode", "symlink", "--python", str(home / "bin" / "python")]
    run(*install, f"{wheel}[stripe]", f"pytest=={OLDEST}")
    folder = tmp_path / "shop"
    folder.mkdir()
    for name, text in {**SHOP, "test_shop": TEST}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))

    ours = ("OUTBOX_", "PYTHON", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [str(home / "bin" / "python"), "-m", "pytest", "-Werror", "--outbox-database-url", "sqlite://"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert f"pytest-{OLDEST}" in done.stdout
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the payload of the nearest entry == what is asserted:" in done.stdout
