"""`demo --stay`: it stays open with work for an operator, and at the end no process and no file remains."""

import json
import os
import re
from pathlib import Path

import httpx
from support.open_demo import open_demo
from support.python_processes import run_python

from examples.demo.stay import STAGING_MESSAGES


def test_an_open_shop_has_work_for_an_operator_and_ends_with_ctrl_c() -> None:
    with open_demo("--sqlite", "--orders", "40") as printed:
        shop = re.search(r"^  shop +(http://127.0.0.1:\d+)/checkout$", printed, re.M)
        exports = dict(re.findall(r"^  export (\w+)='?(.*?)'?$", printed, re.M))
        assert shop, printed

        status = run_python("-m", "dispatchers", "status", "--json", env={**os.environ, **exports}, check=True)
        progress = httpx.get(f"{shop[1]}/progress", trust_env=False)

    found = json.loads(status.stdout)
    assert found["uncertain"] > 0
    assert found["suspended"] == STAGING_MESSAGES
    assert found["blocked_groups"]
    paused = [each["name"] for each in found["destinations"] if each["paused"]]
    assert paused == ["crm"]
    assert progress.status_code == 200
    assert not Path(exports["DATABASE_URL"].removeprefix("sqlite:///")).exists()
    assert is_closed(shop[1])


def is_closed(url: str) -> bool:
    try:
        httpx.get(url, trust_env=False)
    except httpx.ConnectError:
        return True
    return False
