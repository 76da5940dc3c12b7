"""The envelopes: what opens them, what does not, and how often a key service is called."""

import asyncio
import base64
import binascii
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.util import greenlet_spawn
from support.encrypted import FakeService

import outbox
from outbox import encryption as module
from outbox.encryption import Encryption, StoredField

KEYS = {"d1": bytes(range(32)), "d2": bytes(range(1, 33))}
PLACE = StoredField("prod", UUID(int=7), "crm.upsert", "payload")
OTHER_PLACES = {
    "env": PLACE._replace(env="staging"),
    "entry": PLACE._replace(id=UUID(int=8)),
    "operation": PLACE._replace(operation="crm.delete"),
    "field": PLACE._replace(field="result"),
}


@pytest.fixture
def ring() -> Encryption:
    return Encryption(KEYS, current="d1")


@pytest.mark.parametrize("size", [0, 1, 1_000_000])
def test_an_envelope_opens_where_it_was_sealed(ring: Encryption, size: int) -> None:
    data = os.urandom(size)

    assert ring.open(ring.seal(data, PLACE), PLACE) == data


@pytest.mark.parametrize("place", OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_an_envelope_does_not_open_in_another_place(ring: Encryption, place: StoredField) -> None:
    envelope = ring.seal(b"{}", PLACE)

    with pytest.raises(outbox.CannotDecrypt, match="belongs to another entry, field or env"):
        ring.open(envelope, place)


@given(st.binary(max_size=200), st.data())
def test_no_changed_envelope_opens(data: bytes, drawn: st.DataObject) -> None:
    ring = Encryption(KEYS, current="d1")
    envelope = ring.seal(data, PLACE)
    at = drawn.draw(st.integers(0, len(envelope) - 1))
    changed = drawn.draw(
        st.sampled_from([envelope[:at], envelope[:at] + "A" + envelope[at + 1 :], envelope[:at] + envelope[at + 1 :]])
    )

    if changed != envelope:
        with pytest.raises(outbox.CannotDecrypt):
            ring.open(changed, PLACE)


def test_all_keys_decrypt_and_the_first_encrypts(ring: Encryption) -> None:
    text = ",".join(f"{id}:{base64.b64encode(KEYS[id]).decode()}" for id in ("d2", "d1"))
    rotated = Encryption.from_text(text)

    assert rotated.open(ring.seal(b"old", PLACE), PLACE) == b"old"
    assert module.key_id_of(rotated.seal(b"new", PLACE)) == "d2"


def test_a_ring_that_only_decrypts_is_written_with_none_first() -> None:
    ring = Encryption.from_text(f"none,d1:{base64.b64encode(KEYS['d1']).decode()}")

    assert (ring.encrypts, ring.key_ids, ring.open(Encryption({"d1": KEYS["d1"]}).seal(b"x", PLACE), PLACE)) == (
        False,
        ["d1"],
        b"x",
    )


def test_an_id_that_two_keys_have_opens_nothing_of_the_other(ring: Encryption) -> None:
    other = Encryption({"d1": bytes(32)})

    with pytest.raises(outbox.CannotDecrypt, match="key 'd1' has other bytes here"):
        other.open(ring.seal(b"{}", PLACE), PLACE)


def test_an_envelope_that_names_another_key_of_equal_bytes_does_not_open() -> None:
    ring = Encryption({"d1": bytes(32), "d2": bytes(32)}, current="d1")

    with pytest.raises(outbox.CannotDecrypt):
        ring.open(ring.seal(b"{}", PLACE).replace("obx1:d1:", "obx1:d2:"), PLACE)


def test_a_lost_key_is_named(ring: Encryption) -> None:
    with pytest.raises(outbox.CannotDecrypt, match="no data key 'd1', only d2") as caught:
        Encryption({"d2": KEYS["d2"]}).open(ring.seal(b"{}", PLACE), PLACE)

    assert caught.value.key_id == "d1"


def test_no_nonce_is_used_twice_by_threads_or_forks() -> None:
    with ThreadPoolExecutor(4) as pool:
        ring = Encryption(KEYS, current="d1")
        envelopes = list(pool.map(lambda _: ring.seal(b"{}", PLACE), range(2000)))
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, ring.seal(b"{}", PLACE).encode())
        os._exit(0)
    os.waitpid(child, 0)
    envelopes += [os.read(read, 1000).decode(), ring.seal(b"{}", PLACE)]

    nonces = {base64.b64decode(envelope.rsplit(":", 1)[1])[:12] for envelope in envelopes}
    assert len(nonces) == len(envelopes)


@pytest.mark.parametrize(
    ("keys", "current", "problem"),
    [
        ({}, None, "mapping"),
        ({"d1": b"short"}, None, "has 5 bytes"),
        ({"d 1": bytes(32)}, None, "must match"),
        ({"d1": "text"}, None, "must be 32 bytes, or an object with wrap"),
        (KEYS, None, "current=None is not among"),
        (KEYS, "d3", "current='d3' is not among"),
        ({bytes(32): "d1"}, None, "is not shown"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: object, current: str | None, problem: str) -> None:
    with pytest.raises(outbox.ConfigurationError, match=problem):
        Encryption(keys, current)  # type: ignore[arg-type]


def test_no_error_and_no_repr_shows_a_key(ring: Encryption) -> None:
    from support.canaries import leaks, shown

    secret = os.urandom(33)
    with pytest.raises(outbox.ConfigurationError) as caught:
        Encryption.from_text(f"d1:{base64.b64encode(secret).decode()}")

    assert leaks(shown(caught.value) + repr(ring) + repr(ring.open), secret, *KEYS.values()) == []


def test_no_frame_shows_a_key_if_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    key = os.urandom(32)
    text = base64.b64encode(key).decode()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    for create in (lambda: Encryption({"d1": key}), lambda: Encryption.from_text(f"d1:{text}")):
        with pytest.raises(ImportError, match=r"sqlalchemy-outbox\[encryption\]") as caught:
            create()
        frames = repr([frame.frame.f_locals for frame in caught.traceback[2:]])
        assert (repr(key) in frames, text in frames, len(frames) > 10) == (False, False, True)


def test_a_process_that_does_not_encrypt_does_not_load_cryptography() -> None:
    code = "import outbox, dispatchers, dispatchers.process.dispatcher, sys; print('cryptography' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# --- a key service


def test_a_key_service_is_called_once_for_many_values() -> None:
    service = FakeService()
    writer = Encryption({"kms": service})
    envelopes = [writer.seal(b"%d" % number, PLACE) for number in range(500)]
    reader = Encryption({"kms": service})

    assert [reader.open(envelope, PLACE) for envelope in envelopes] == [b"%d" % number for number in range(500)]
    assert service.calls == ["wrap", "unwrap"]


def finish_renewal() -> None:
    for thread in threading.enumerate():
        if thread.name == "outbox-keys":
            thread.join(60)


def test_a_data_key_is_renewed_and_used_on_while_the_service_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    service, now = FakeService(), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    ring = Encryption({"kms": service})
    first = ring.seal(b"1", PLACE)
    service.down = True
    now[0] += module.DATA_KEY_SECONDS
    for _ in range(120):  # an hour, every 30 seconds
        for _ in range(10):
            assert ring.open(ring.seal(b"2", PLACE), PLACE) == b"2"
            finish_renewal()
        now[0] += module.RENEW_AGAIN_SECONDS
    service.down = False
    now[0] += module.RENEW_AGAIN_SECONDS
    ring.seal(b"3", PLACE)
    finish_renewal()

    assert ring.seal(b"4", PLACE).split(":")[2] != first.split(":")[2]
    assert len(service.calls) <= 123


def test_a_data_key_is_renewed_after_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DATA_KEY_USES", 10)
    ring = Encryption({"kms": FakeService()})
    wrapped = []
    for _ in range(110):
        wrapped.append(ring.seal(b"", PLACE).split(":")[2])
        finish_renewal()

    assert {wrapped.count(each) for each in wrapped} == {11}  # the call that begins the renewal uses the old one


def test_without_a_data_key_an_outage_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    service, now = FakeService(down=True), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    ring = Encryption({"kms": service})
    for _ in range(100):
        with pytest.raises(outbox.KeyServiceFailed):
            ring.seal(b"{}", PLACE)

    assert service.calls == ["wrap"]  # it is not called again at once
    service.down = False
    now[0] += module.DOWN_SECONDS
    assert ring.seal(b"{}", PLACE)


def test_a_data_key_that_fails_is_not_asked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    service, now = FakeService(), [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    envelope = Encryption({"kms": service}).seal(b"{}", PLACE)
    service.calls.clear()
    service.down = True
    reader = Encryption({"kms": service})
    for _ in range(60):
        with pytest.raises(outbox.KeyServiceFailed):
            reader.open(envelope, PLACE)
        now[0] += 1

    assert len(service.calls) <= 60 / module.FAILED_SECONDS + 1


def test_a_service_that_unwraps_another_key_opens_nothing() -> None:
    service = FakeService()
    envelope = Encryption({"kms": service}).seal(b"{}", PLACE)
    service.wrong = True

    with pytest.raises(outbox.CannotDecrypt):
        Encryption({"kms": service}).open(envelope, PLACE)


def test_an_envelope_with_the_wrapped_key_of_another_does_not_open() -> None:
    service = FakeService()
    ring, other = Encryption({"kms": service}), Encryption({"kms": service})
    head, kid, _, sealed = ring.seal(b"{}", PLACE).split(":")
    foreign = other.seal(b"{}", PLACE).split(":")[2]

    with pytest.raises(outbox.CannotDecrypt):
        ring.open(f"{head}:{kid}:{foreign}:{sealed}", PLACE)


def test_a_fork_gets_a_data_key_of_its_own_although_a_thread_held_the_lock() -> None:
    entered, leave, parent = threading.Event(), threading.Event(), os.getpid()

    class Slow(FakeService):
        def wrap(self, data_key: bytes) -> bytes:
            entered.set()
            if os.getpid() == parent:
                leave.wait(60)
            return super().wrap(data_key)

    ring = Encryption({"kms": Slow()})
    thread = threading.Thread(target=ring.seal, args=(b"{}", PLACE))
    thread.start()
    entered.wait(60)
    if (child := os.fork()) == 0:
        ring.seal(b"{}", PLACE)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()

    assert status == 0


def test_data_keys_of_threads_that_begin_together_are_one() -> None:
    service, barrier = FakeService(), threading.Barrier(8)
    ring = Encryption({"kms": service})

    def seal(_: int) -> str:
        barrier.wait(60)
        return ring.seal(b"{}", PLACE._replace(id=uuid4()))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(seal, range(8)))

    assert service.calls == ["wrap"]


class Hanging(FakeService):
    """Hangs until `leave` is set. inside: set when a call has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def _answer(self, method: str, data: bytes) -> bytes:
        self.inside.set()
        assert self.leave.wait(60)
        return super()._answer(method, data)


def test_a_service_that_hangs_stops_no_one_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_SECONDS", 0.05)
    service = Hanging()
    ring = Encryption({"kms": service})
    for problem in ("has not answered within 0.05 s", "does not answer", "does not answer"):
        with pytest.raises(outbox.KeyServiceFailed, match=problem):
            ring.seal(b"{}", PLACE)
    service.leave.set()
    finish_renewal()

    assert service.calls == ["wrap"]  # although it came late, its data key is used
    assert ring.seal(b"{}", PLACE)


def test_while_a_renewal_hangs_the_old_data_key_is_used() -> None:
    service = Hanging()
    service.leave.set()
    ring = Encryption({"kms": service})
    first = ring.seal(b"{}", PLACE).split(":")[2]
    service.leave.clear()
    ring._services["kms"]._own.last(0.0)  # type: ignore[union-attr]

    assert {ring.seal(b"{}", PLACE).split(":")[2] for _ in range(100)} == {first}
    service.leave.set()
    finish_renewal()
    assert (service.calls, ring.seal(b"{}", PLACE).split(":")[2] == first) == (["wrap", "wrap"], False)


def test_no_event_loop_is_blocked_while_a_greenlet_waits_for_the_service() -> None:
    envelope = Encryption({"kms": FakeService()}).seal(b"{}", PLACE)
    service = Hanging()
    ring = Encryption({"kms": service})

    async def main() -> list[bytes]:
        opening = [asyncio.create_task(greenlet_spawn(ring.open, envelope, PLACE)) for _ in range(3)]
        await asyncio.to_thread(service.inside.wait, 60)
        service.leave.set()  # the loop has come this far, while three of its tasks wait
        return await asyncio.gather(*opening)

    assert asyncio.run(main()) == [b"{}"] * 3
    assert service.calls == ["unwrap"]


class Refusing(FakeService):
    """Refuses one wrapped key, as a service whose key was deleted."""

    def unwrap(self, wrapped: bytes) -> bytes:
        if wrapped == b"refused":
            self.calls.append("refused")
            raise ValueError("no such key")
        return super().unwrap(wrapped)


REFUSED = "obx1:kms:cmVmdXNlZA==:AAAA"


def test_a_wrapped_key_that_is_refused_does_not_stop_the_others() -> None:
    service = Refusing()
    envelope = Encryption({"kms": service}).seal(b"{}", PLACE)
    reader = Encryption({"kms": service})
    for _ in range(3):
        with pytest.raises(outbox.KeyServiceFailed):
            reader.open(REFUSED, PLACE)

    assert reader.open(envelope, PLACE) == b"{}"
    assert reader.seal(b"{}", PLACE)
    assert service.calls.count("refused") == 1


def test_an_outage_is_not_held_against_keys_that_were_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    class Slow(FakeService):
        def unwrap(self, wrapped: bytes) -> bytes:
            now[0] += 5 * self.down
            return super().unwrap(wrapped)

    service = Slow()
    envelopes = [Encryption({"kms": service}).seal(b"{}", PLACE) for _ in range(2)]
    service.calls.clear()
    service.down = True
    reader = Encryption({"kms": service})
    for envelope in envelopes:
        with pytest.raises(outbox.KeyServiceFailed):
            reader.open(envelope, PLACE)
    assert service.calls == ["unwrap"]  # one timeout, not two
    service.down = False
    now[0] += module.DOWN_SECONDS

    assert reader.open(envelopes[1], PLACE) == b"{}"


@pytest.mark.parametrize(
    "envelope", ["obx1:kms:\ufffd:AAAA", "obx1:kms:\xe9:AAAA", f"obx1:{'x' * 99_999}::AAAA", "obx1:\0::A"]
)
def test_a_damaged_head_is_an_error_of_the_envelope(envelope: str) -> None:
    with pytest.raises(outbox.CannotDecrypt) as caught:
        Encryption({"kms": FakeService()}).open(envelope, PLACE)
    assert len(str(caught.value)) < 200


def test_a_service_that_wraps_a_key_into_nothing_is_refused() -> None:
    class Empty(FakeService):
        def wrap(self, data_key: bytes) -> bytes:
            return b""

    with pytest.raises(outbox.KeyServiceFailed, match="returned nothing"):
        Encryption({"kms": Empty()}).seal(b"{}", PLACE)


@pytest.mark.parametrize("form", [lambda key: key.hex(), lambda key: key.hex().encode()], ids=["str", "bytes"])
def test_no_frame_of_an_error_shows_a_key_in_another_form(form: Any) -> None:
    service = FakeService()
    envelope = Encryption({"kms": service}).seal(b"{}", PLACE)
    key = service.unwrap(binascii.a2b_base64(envelope.split(":")[2]))

    class Hex(FakeService):
        def unwrap(self, wrapped: bytes) -> Any:
            return form(super().unwrap(wrapped))

    with pytest.raises(outbox.CannotDecrypt if form(key) == key.hex().encode() else outbox.KeyServiceFailed) as caught:
        Encryption({"kms": Hex()}).open(envelope, PLACE)
    frames = [frame.frame.f_locals for frame in caught.traceback[1:]]
    assert key.hex() not in repr(frames)
