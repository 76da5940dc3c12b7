"""What an editor knows of a typed effect: mypy and basedpyright infer the same types, and refuse the same lines."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SNIPPETS = ROOT / "tests/support/snippets/typed_effects.py"
PROGRAMS = Path(sys.executable).parent

EXPECTED = {
    number: match
    for number, line in enumerate(SNIPPETS.read_text().splitlines(), start=1)
    if (match := re.search(r"\)  # (type: (?P<type>.+)|error)$|\S  # (error)$", line))
}


def with_mypy(cache: Path) -> list[tuple[int, str, str]]:
    """(line, kind, text) of each report. It has the project's settings and cache: a cache of its own would take a minute."""
    command = [PROGRAMS / "mypy", "--no-error-summary", "--hide-error-context", SNIPPETS]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r"^\S+?:(\d+): (error|note): (.*)$", reported.stdout, re.MULTILINE)
    return [(int(line), kind, text) for line, kind, text in found]


def with_basedpyright(cache: Path) -> list[tuple[int, str, str]]:
    settings = cache / "pyrightconfig.json"
    included = {"include": [str(SNIPPETS)], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    settings.write_text(json.dumps(included | {"reportUnusedExpression": False}))
    command = [PROGRAMS / "basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", settings]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(reported.stdout)["generalDiagnostics"]
    return [
        (each["range"]["start"]["line"] + 1, "note" if each["severity"] == "information" else "error", each["message"])
        for each in found
    ]


@pytest.mark.parametrize("check", [with_mypy, with_basedpyright])
def test_type_checkers_infer_typed_effects(check: Callable[[Path], list[tuple[int, str, str]]], tmp_path: Path) -> None:
    reported = check(tmp_path)

    revealed = {line: _short(text) for line, kind, text in reported if kind == "note"}
    assert {line for line, kind, _ in reported if kind == "error"} == _lines("error"), reported
    assert {line: revealed.get(line) for line in _lines("type")} == {
        line: EXPECTED[line]["type"] for line in _lines("type")
    }


def _lines(kind: str) -> set[int]:
    return {line for line, match in EXPECTED.items() if (match["type"] is None) == (kind == "error")}


def _short(text: str) -> str:
    """The revealed type without its modules. mypy shows a TypedDict with its items."""
    (revealed,) = re.findall(r'(?:Revealed type is|Type of ".*" is) "(.*)"$', text, re.DOTALL) or [text]
    return re.sub(r"TypedDict\((\w+), \{[^}]*\}\)", r"\1", re.sub(r"(\w+\.)+(?=\w)", "", revealed))
