"""docs/dashboard.md lists every view and action of the JSON API, and every code of a problem."""

import re

from support.docs_pages import ROOT, rows_of

from dispatchers.dashboard.pages import ACTIONS, VIEWS

PAGE = (ROOT / "docs" / "dashboard.md").read_text()


def test_the_page_lists_every_view_and_action() -> None:
    expected = [{"operation": f"GET {view.api_path}", "role": str(view.role)} for view in VIEWS]
    expected += [{"operation": f"POST {action.path}", "role": str(action.role)} for action in ACTIONS]

    listed = [{name: row[name] for name in ("operation", "role")} for row in rows_of(PAGE, "operation", "role")]

    assert listed == expected


def test_the_page_lists_every_code_of_a_problem() -> None:
    folder = ROOT / "dispatchers" / "dashboard"
    sources = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    raised = set(re.findall(r"Failure\(\s*\d+,\s*\"(\w+)\"", sources))

    listed = {code for row in rows_of(PAGE, "status", "`code`") for code in re.findall(r"\w+", row["`code`"])}

    assert raised <= listed
