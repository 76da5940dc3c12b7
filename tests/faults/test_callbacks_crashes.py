"""A chain of effects, its processes killed around a callback: each link happens once on the remote service."""

import signal
from pathlib import Path

import pytest
from support.daemons import FileService, daemon, wait_for, write_factory
from support.database import CHARGE, Database
from support.entries import HOUR, age, put_one, run_once, states

import outbox

CHAIN = """
from support.daemons import FileService, OverStore, die_at
from dispatchers.store.database import DatabaseStore
from support.database import CHARGE, Order

moment = os.environ["MOMENT"]
effects = Operations()

@effects.on_settled(CHARGE)
def charged(session, settlement):
    die_at(moment, here="as the callback begins")
    session.add(Order(customer=settlement.entry.parent.key, amount=2000))
    ob.enqueue(session, "mail.receipt", {"charge": settlement.result["key"]})
    session.flush()
    die_at(moment, here="before the callback's commit")

class DyingStore(DatabaseStore):
    async def settle_with(self, entry, end, callback):
        settled = await super().settle_with(entry, end, callback)
        die_at(moment, here="after the callback's commit")
        return settled

def make():
    service = FileService(here)
    return OverStore(
        DyingStore(url, ob.configuration), outbox=ob, include=[effects], poll=timedelta(seconds=0.02),
        adapters={"stripe": service, "mail": service},
    )
"""

HANGING = """
from support.daemons import FileService
from support.database import CHARGE

effects = Operations()

@effects.on_settled(CHARGE)
def charged(session, settlement):
    (here / "entered").touch()
    time.sleep(600)

def make():
    return Dispatcher(
        url, outbox=ob, include=[effects], adapters={"stripe": FileService(here)}, grace=timedelta(seconds=0.3),
        poll=timedelta(seconds=0.02),
    )
"""


@pytest.mark.parametrize(
    "moment", ["as the callback begins", "before the callback's commit", "after the callback's commit"]
)
def test_a_chain_killed_around_the_callback_has_each_effect_once(
    database: Database, ob: outbox.Outbox, tmp_path: Path, moment: str
) -> None:
    put_one(database, ob, CHARGE, parent="invoice:42")
    write_factory(tmp_path, CHAIN)
    service = FileService(tmp_path)
    committed = moment == "after the callback's commit"

    with daemon(tmp_path, database.url, MOMENT=moment) as process:
        assert process.wait() == -signal.SIGKILL, process.output
    assert len(database.orders) == committed
    # the other claim loop may have claimed the receipt already
    assert states(database) in (
        [{"delivered": 1, "pending": 1}, {"delivered": 1, "sending": 1}] if committed else [{"sending": 1}]
    )
    age(database, HOUR)
    with daemon(tmp_path, database.url, MOMENT="") as process:
        wait_for(lambda: states(database) == {"delivered": 2}, "the receipt", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    keys = [ob.child_key("invoice:42", operation) for operation in (CHARGE, "mail.receipt")]
    assert sorted(service.effects) == sorted(keys)
    assert [order.customer for order in database.orders] == ["invoice:42"]
    assert service.sent.count(keys[0]) == (1 if committed else 2)


def test_a_process_with_a_callback_that_never_ends_ends_all_the_same(
    postgresql: Database, ob: outbox.Outbox, tmp_path: Path
) -> None:
    put_one(postgresql, ob, CHARGE)
    write_factory(tmp_path, HANGING)

    with daemon(tmp_path, postgresql.url) as process:
        wait_for((tmp_path / "entered").exists, "the callback", workers=[process])
        process.terminate()
        assert process.wait() == 0, process.output

    assert states(postgresql) == {"sending": 1}
    assert run_once(postgresql, ob, adapters={"stripe": FileService(tmp_path)}) == 0, "its lease still holds"
    age(postgresql, HOUR)
    assert run_once(postgresql, ob, adapters={"stripe": FileService(tmp_path)}) == 1
    assert len(FileService(tmp_path).effects) == 1
