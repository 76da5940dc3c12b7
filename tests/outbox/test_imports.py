"""A reader follows the imports from a file to those below it, and never comes back."""

import subprocess
import sys
from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("outbox", "dispatchers", exclude_type_checking_imports=True, cache_dir=None)

    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    TopologicalSorter(below).prepare()  # raises CycleError, which names the files


def test_importing_outbox_loads_no_database_that_the_app_does_not_use() -> None:
    program = "import sys, outbox; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert "outbox.instance" in loaded
    assert [name for name in loaded if name.startswith("sqlalchemy.dialects.")] == []
    assert not {"psycopg", "asyncpg", "alembic", "click"} & set(loaded)
