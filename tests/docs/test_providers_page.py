"""docs/providers.md says what the profiles state."""

import re

from support.provider_page import PAGE, generated

from dispatchers.adapters.providers import PROVIDERS


def test_the_page_is_generated_from_the_profiles() -> None:
    page = PAGE.read_text()

    assert page.endswith(generated()), "run `python3 dev.py providers`"


def test_the_page_names_every_operation_and_source() -> None:
    page = PAGE.read_text()

    operations = {f"{profile.name}.{name}" for profile in PROVIDERS.values() for name in profile.operations}
    sources = {source for profile in PROVIDERS.values() for source in profile.sources}
    assert operations <= {*re.findall(r"^\| `([\w.]+)` \|", page, re.M)}
    assert sources <= {*re.findall(r"<(https://[^>]+)>", page)}


def test_the_readme_counts_the_services() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()

    assert f"[{len(PROVIDERS)} other services by name](docs/providers.md)" in readme
