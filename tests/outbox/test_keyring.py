"""The key ring: what it takes, what it refuses, and that it never shows a secret."""

import base64
import copy
import os
import pickle
import traceback

import pytest
from support.canaries import leaks, shown

import outbox
from outbox.configuration import configuration_from_environment
from outbox.keys import derive_tag, entry_id, key_fields

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
FIELDS = key_fields("prod", outbox.ParentKey("invoice:42"), "email.send", "receipt")


def encoded(secret):
    return base64.b64encode(secret).decode()


NO_MAPPING = (
    "a key ring is made of a mapping from kids to secrets, not {} (it is not shown): Keyring({{'k1': secret}}), or"
    " Keyring.from_text(...) for text as OUTBOX_SECRET holds it"
)


def test_a_rotation_gives_new_keys_and_keeps_the_ids_and_the_old_keys():
    before = outbox.Keyring({"k1": OLD})
    after = outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2")

    assert derive_tag(after, "k1", FIELDS) == derive_tag(before, "k1", FIELDS)
    assert derive_tag(after, after.current, FIELDS) != derive_tag(before, before.current, FIELDS)
    assert entry_id(FIELDS).version == 8


def test_a_new_kid_for_an_old_secret_changes_no_key():
    assert derive_tag(outbox.Keyring({"a": OLD}), "a", FIELDS) == derive_tag(outbox.Keyring({"b": OLD}), "b", FIELDS)


def test_a_single_secret_is_the_current_one():
    assert outbox.Keyring({"k1": OLD}).current == "k1"


def test_text_names_the_current_secret_first():
    ring = outbox.Keyring.from_text(f"k2:{encoded(NEW)}, k1:{encoded(OLD)}")

    assert ring == outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2")
    assert "k1" in ring
    assert "k3" not in ring


def test_an_unknown_kid_is_an_error_that_names_the_known_ones():
    ring = outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2")

    with pytest.raises(outbox.ConfigurationError) as caught:
        ring.secret("k3")

    assert str(caught.value) == "no secret for kid 'k3'; the key ring has ['k1', 'k2']"


@pytest.mark.parametrize(
    ("secrets", "current", "text"),
    [
        ({}, None, "a key ring needs at least one secret: `outbox keys generate` creates one"),
        ({"k1": OLD, "k2": NEW}, None, "current=None is not among the key ring's kids ['k1', 'k2']"),
        ({"k1": OLD}, "k2", "current='k2' is not among the key ring's kids ['k1']"),
        ({"k 1": OLD}, None, "kid 'k 1' must match [A-Za-z0-9_.-]{1,64}"),
        ({"": OLD}, None, "kid '' must match [A-Za-z0-9_.-]{1,64}"),
        ({"k" * 65: OLD}, None, f"kid '{'k' * 65}' must match [A-Za-z0-9_.-]{{1,64}}"),
        ({"k1": OLD}, ["k1"], "current=['k1'] is not among the key ring's kids ['k1']"),
        ({"k1": bytearray(OLD)}, None, "the secret of kid 'k1' must be bytes, not bytearray"),
        ({OLD: "k1"}, None, "a kid of the key ring must be a str, not bytes (it is not shown)"),
        ({"k1": OLD, 2: NEW}, "k1", "a kid of the key ring must be a str, not int (it is not shown)"),
        ([("k1", OLD)], None, NO_MAPPING.format("list")),
        (f"k1:{encoded(OLD)}", None, NO_MAPPING.format("str")),
        ({"k1": "0" * 32}, None, "the secret of kid 'k1' must be bytes, not str"),
        (
            {"k1": OLD[:31]},
            None,
            "the secret of kid 'k1' has 31 bytes; at least 32 random ones are needed: `outbox keys generate` creates one",
        ),
    ],
)
def test_a_ring_that_cannot_work_is_refused(secrets, current, text):
    with pytest.raises(outbox.ConfigurationError) as caught:
        outbox.Keyring(secrets, current)

    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("ring_text", "text"),
    [
        ("", "a secret must be written as kid:base64, several separated by commas"),
        ("k1", "a secret must be written as kid:base64, several separated by commas"),
        (f"k1:{encoded(OLD)},", "a secret must be written as kid:base64, several separated by commas"),
        (f"k1:{encoded(OLD)},k1:{encoded(NEW)}", "kid 'k1' occurs twice in the key ring"),
        (
            "k1:",
            "the secret of kid 'k1' has 0 bytes; at least 32 random ones are needed: `outbox keys generate` creates one",
        ),
        (f":{encoded(OLD)}", "secret 1 of the key ring has no kid that matches [A-Za-z0-9_.-]{1,64}"),
    ],
)
def test_text_that_is_no_ring_is_refused(ring_text, text):
    with pytest.raises(outbox.ConfigurationError) as caught:
        outbox.Keyring.from_text(ring_text)

    assert str(caught.value) == text


def test_what_is_no_text_is_refused_as_a_ring():
    with pytest.raises(outbox.ConfigurationError) as caught:
        outbox.Keyring.from_text(os.environ.get("NO_SUCH_SECRET"))

    assert str(caught.value) == "a key ring's text must be a str, not NoneType: is OUTBOX_SECRET set?"


def test_a_secret_that_is_no_base64_is_refused_without_showing_it():
    with pytest.raises(outbox.ConfigurationError, match="secret 1 of the key ring is not kid:base64: ") as caught:
        outbox.Keyring.from_text("k1:do-not-show-me!")

    assert "show" not in str(caught.value)


def test_a_secret_in_the_place_of_its_kid_is_not_shown():
    with pytest.raises(outbox.ConfigurationError, match="secret 1 of the key ring is not kid:base64: ") as caught:
        outbox.Keyring.from_text(f"{encoded(OLD)}:k1")

    assert encoded(OLD) not in str(caught.value)


@pytest.mark.parametrize("show", [repr, str, "{}".format])
def test_secrets_are_never_shown(show):
    ring = outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2")

    shown = show(ring)

    assert shown == "Keyring(kids=['k1', 'k2'], current='k2')"


def test_secrets_are_never_shown_by_what_holds_the_ring():
    secret = b"a secret of thirty-two bytes....."
    ob = outbox.Outbox(outbox.Keyring({"k1": secret}), env="prod")

    for text in (repr(ob), repr(ob.configuration), str(vars(ob.configuration))):
        assert "secret of thirty-two" not in text


def test_rings_are_equal_when_their_secrets_and_current_kids_are():
    one = outbox.Keyring({"k1": OLD, "k2": NEW}, current="k1")

    assert one == outbox.Keyring({"k2": NEW, "k1": OLD}, current="k1")
    assert one != outbox.Keyring({"k1": OLD, "k2": NEW}, current="k2")
    assert one != outbox.Keyring({"k1": OLD}, current="k1")
    assert one != "k1"


def test_a_ring_does_not_change_with_the_mapping_that_it_was_made_of():
    secrets = {"k1": OLD}
    ring = outbox.Keyring(secrets)

    secrets["k1"] = NEW

    assert ring.secret("k1") == OLD


def test_the_public_ring_is_not_one_of_zero_bytes():
    zeros = outbox.Keyring({"public": bytes(32)})

    assert derive_tag(outbox.Keyring.public(), "public", FIELDS) != derive_tag(zeros, "public", FIELDS)
    assert outbox.Keyring.public() != zeros
    assert outbox.Keyring.public() == outbox.Keyring.public()


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_ring_is_neither_pickled_nor_copied(take):
    with pytest.raises(TypeError, match="its secrets would be copied too"):
        take(outbox.Keyring({"k1": OLD}))


SECRET = b"thirty-one bytes: one too few.."
REFUSED = {
    "a short secret": lambda: outbox.Keyring({"k1": SECRET}),
    "a short secret as text": lambda: outbox.Keyring.from_text(f"k1:{encoded(SECRET)}"),
    "no base64": lambda: outbox.Keyring.from_text(f"k1:{encoded(SECRET)}!"),
    "twice": lambda: outbox.Keyring.from_text(",".join([f"k1:{encoded(SECRET + b'.')}"] * 2)),
    "unknown current": lambda: outbox.Keyring({"k1": SECRET + b"."}, current="k2"),
    "the environment": configuration_from_environment,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_no_frame_of_a_refusal_holds_the_secret(make, monkeypatch):
    """An error tracker sends the variables of each frame along."""
    monkeypatch.setenv("OUTBOX_SECRET", f"k1:{encoded(SECRET)}")
    monkeypatch.setenv("OUTBOX_ENV", "prod")

    with pytest.raises(outbox.ConfigurationError) as caught:
        make()

    ours = [frame for frame, _ in traceback.walk_tb(caught.tb) if "/outbox/" in frame.f_code.co_filename]
    variables = repr([frame.f_locals for frame in ours])
    assert ours
    assert leaks(variables + shown(caught.value), SECRET, SECRET + b".") == []
