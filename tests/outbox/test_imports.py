"""A reader follows the imports from a file to those below it, and never comes back."""

from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_itself_through_others() -> None:
    graph = grimp.build_graph("outbox", "dispatchers", exclude_type_checking_imports=True, cache_dir=None)

    below = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}

    TopologicalSorter(below).prepare()  # raises CycleError, which names the files
