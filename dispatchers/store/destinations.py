"""The names of the destinations that have unsettled entries."""

from sqlalchemy import CTE, func, select

from outbox.sql.schema import Tables


def destination_names(tables: Tables) -> CTE:
    """A query of one column, `name`, whose last row is NULL: a skip scan, one probe of the queue's index for each name,
    however many rows each has.
    """
    queue = tables.queue.alias()
    names = select(func.min(queue.c.destination).label("name")).cte("names", recursive=True)
    following = select(func.min(queue.c.destination)).where(queue.c.destination > names.c.name).scalar_subquery()
    return names.union_all(select(following).where(names.c.name.is_not(None)))
