"""The failover guard on Galera: a cluster that is started again, a node outside the majority, a new cluster with old data."""

import asyncio

import pytest
import sqlalchemy as sa
from support.database import TABLES
from support.galera_cluster import NEW_CLUSTER, Cluster, missing_part, running_cluster

import outbox
from dispatchers.store.database import DatabaseStore

pytestmark = pytest.mark.skipif(missing_part() is not None, reason=f"a Galera cluster needs {missing_part()}")


def suspended(cluster: Cluster, ob: outbox.Outbox) -> str | None:
    (url, *_) = cluster.urls("shop")
    engine = sa.create_engine(url, isolation_level="READ COMMITTED", poolclass=sa.NullPool)
    return asyncio.run(DatabaseStore(engine, ob.configuration).check_identity("test", None)).suspended


def start_again(cluster: Cluster) -> None:
    (node,) = cluster.nodes
    node.start(NEW_CLUSTER)
    cluster.until_whole()


def test_only_a_new_cluster_with_the_old_data_is_noticed(ob: outbox.Outbox) -> None:
    with running_cluster(size=1) as cluster:
        (node,) = cluster.nodes
        TABLES.metadata.create_all(sa.create_engine(*cluster.urls("shop"), poolclass=sa.NullPool))
        assert suspended(cluster, ob) is None
        node.stop()
        start_again(cluster)
        assert suspended(cluster, ob) is None

        node.stop()
        node.lose_data()
        start_again(cluster)

        assert str(suspended(cluster, ob)).startswith("the server has changed, system identifier ")
