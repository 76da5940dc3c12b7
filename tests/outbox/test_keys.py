"""Child keys and entry ids are what docs/keys.md says, to the bit; and the ring of their secrets, which it never shows."""

import base64
import copy
import hashlib
import hmac
import os
import pickle
import re
import traceback
from uuid import UUID

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.canaries import leaks, shown

import outbox
from outbox.configuration import configuration_from_environment
from outbox.keys import (
    BLOCK_BYTES,
    LIMITS,
    SECRET_BYTES_MIN,
    Tag,
    derive_tag,
    encode_hex,
    encode_native,
    encode_uuid,
    entry_id,
    ids_under,
    key_fields,
    pae,
    parent_id,
)

SECRET = bytes(range(32))
KEYRING = outbox.Keyring({"k1": SECRET})
UUID_KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"
FIRST = ("prod", "acct_1", "http", UUID_KEY, "stripe.payment_intents.create", "")
RECEIPT = ("prod", "", "app", "invoice:42", "email.send", "receipt")
FOURTH = ("prod", "a", "http", "b:c", "d", "")


def fields_of(env, scope, source, parent, operation, discriminator):
    return key_fields(env, outbox.ParentKey(parent, scope=scope, source=source), operation, discriminator)


def tag_of(row, *, keyring=KEYRING, epoch=0):
    return derive_tag(keyring, keyring.current, fields_of(*row), epoch)


# --- vectors


@pytest.mark.parametrize(
    ("row", "native", "prefix"),
    [
        (FIRST, "ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ", "62deb1a72db8268bbd98de28e534d23f"),
        (
            ("prod", "acct_2", "http", UUID_KEY, "stripe.payment_intents.create", ""),
            "ck1_9wo-K7q4YgZ2M6buM87tO-XbUfBrSrg8",
            "f70a3e2bbab862067633a6ee33ceed3b",
        ),
        (
            ("prod", "acct_1", "http", UUID_KEY, "resend.emails.send", "receipt:ada@example.com"),
            "ck1_hzTyialCYLyQ80htR74qq6v5kXEzC0uO",
            "8734f289a94260bc90f3486d47be2aab",
        ),
        (FOURTH, "ck1_FOmFYs3kB9VIlgIJuEkkVeoqbdrM13kR", "14e98562cde407d548960209b8492455"),
        (
            ("prod", "a:b", "http", "c", "d", ""),
            "ck1_n0NzV3gzyXAUoMw2MWEE5AqOdkQeM9RN",
            "9f4373577833c97014a0cc36316104e4",
        ),
    ],
)
def test_the_published_vectors_of_native_keys_and_tags(row, native, prefix):
    tag = tag_of(row)

    assert encode_native(tag) == native
    assert tag[:16].hex() == prefix
    assert len(tag) == 32


@pytest.mark.parametrize(
    ("row", "id_", "epoch_1", "public"),
    [
        (
            FIRST,
            "a4633227-889c-8a14-b547-b020040e96b6",
            "ck1_0WP0qKVUWerrxcJoC-o5Cw7TIxISsOs3",
            "ck1_QvfXAy2LVXh-4T9AFdZIXWJXlt75mJTC",
        ),
        (
            RECEIPT,
            "a4a307c2-d4b5-8de2-be48-ed080be9b2d2",
            "ck1_RxNuugg90vk7efqrdmYYJt0pNp3kKKio",
            "ck1_ifrf9sBdB5JGX1u0fBJGXOzHSXWjWseJ",
        ),
        (
            FOURTH,
            "0e34a000-b5ad-8709-a0a2-cd698e9cec74",
            "ck1_4BVkkUzJgooMVqIitnB-gkU4d6OQF5Mz",
            "ck1_ZDLoBX082GnmN2bHKl3NjRVkkzV7EmLD",
        ),
    ],
)
def test_the_published_vectors_of_entry_ids_epochs_and_the_public_ring(row, id_, epoch_1, public):
    assert str(entry_id(fields_of(*row))) == id_
    assert encode_native(tag_of(row, epoch=1)) == epoch_1
    assert encode_native(tag_of(row, keyring=outbox.Keyring.public())) == public


def test_the_face_derives_the_same_keys():
    ob = outbox.Outbox(KEYRING, env="prod")
    parent = outbox.ParentKey(UUID_KEY, scope="acct_1", source="http")

    assert ob.child_key(parent, "stripe.payment_intents.create") == "ck1_Yt6xpy24Jou9mN4o5TTSP1m0D2yEkGhZ"
    assert ob.child_key("invoice:42", "email.send", "receipt") == encode_native(tag_of(RECEIPT))


def test_epochs_give_keys_of_their_own():
    assert len({tag_of(FIRST, epoch=epoch) for epoch in range(12)}) == 12


def test_an_epoch_of_the_public_ring_is_not_its_first_nor_a_secret_rings():
    public = outbox.Keyring.public()

    keys = {tag_of(FIRST, keyring=ring, epoch=epoch) for ring in (KEYRING, public) for epoch in (0, 1)}

    assert len(keys) == 4


# --- against the specification, implemented again

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
names = st.from_regex(r"[a-z0-9_]{1,9}(\.[a-z0-9_]{1,9}){0,3}", fullmatch=True)
rows = st.tuples(
    text.map(lambda env: (env or "env")[:16]),
    text.map(lambda scope: scope or "scope"),
    text.map(lambda source: (source or "app")[:16]),
    text.map(lambda parent: parent or "parent"),
    names,
    text,
)


def joined(parts):
    encoded = [len(parts).to_bytes(8, "big")]
    for part in parts:
        encoded += [len(part).to_bytes(8, "big"), part]
    return b"".join(encoded)


def uuid8(data):
    digest = hashlib.sha256(data).hexdigest()[:32]
    return UUID(f"{digest[:12]}8{digest[13:16]}{'89ab'[int(digest[16], 16) % 4]}{digest[17:]}")


@given(row=rows, epoch=st.integers(0, 300))
def test_any_fields_derive_as_the_specification_says(row, epoch):
    fields = [field.encode() for field in row]

    expected = [b"obx/child-key/v1", *fields] if epoch == 0 else [b"obx/child-key/v1/epoch", *fields, b"%d" % epoch]
    assert tag_of(row, epoch=epoch) == hmac.new(SECRET, joined(expected), hashlib.sha256).digest()
    parent = parent_id(row[0], outbox.ParentKey(row[3], row[1], row[2]))
    own = entry_id(fields_of(*row))
    assert parent == uuid8(joined([b"obx/parent-id/v1", *fields[:4]]))
    assert own.hex == parent.hex[:8] + uuid8(joined([b"obx/entry-id/v1", *fields])).hex[8:]
    assert ids_under(parent)[0] <= own <= ids_under(parent)[1]


@given(secret=st.binary(min_size=SECRET_BYTES_MIN, max_size=3 * BLOCK_BYTES), row=rows)
@example(secret=b"k" * (BLOCK_BYTES + 1), row=("prod", "", "app", "invoice:42", "email.send", ""))
def test_a_tag_is_the_hmac_under_a_secret_of_any_length(secret, row):
    fields = [field.encode() for field in row]

    tag = derive_tag(outbox.Keyring({"k1": secret}), "k1", fields_of(*row))

    assert tag == hmac.digest(secret, joined([b"obx/child-key/v1", *fields]), "sha256")


@given(one=rows, other=rows)
def test_different_fields_give_different_keys_and_ids(one, other):
    assume(one != other)

    assert tag_of(one) != tag_of(other)
    assert entry_id(fields_of(*one)) != entry_id(fields_of(*other))


@given(parts=st.lists(st.binary(max_size=12), max_size=5), others=st.lists(st.binary(max_size=12), max_size=5))
def test_two_lists_of_parts_never_give_the_same_bytes(parts, others):
    assert (pae(*parts) == pae(*others)) == (parts == others)


@given(text=st.text(alphabet="ab\x01:", min_size=2, max_size=12), cut=st.data())
def test_moving_a_boundary_between_two_fields_changes_the_key(text, cut):
    first, second = sorted(cut.draw(st.lists(st.integers(1, len(text) - 1), min_size=2, max_size=2)))
    assume(first != second)

    assert tag_of(("prod", text[:first], "http", text[first:], "d", "")) != tag_of(
        ("prod", text[:second], "http", text[second:], "d", "")
    )


def test_names_are_not_normalised():
    composed, decomposed = "caf\u00e9", "cafe\u0301"

    assert tag_of(("prod", "", "app", composed, "d", "")) != tag_of(("prod", "", "app", decomposed, "d", ""))


# --- encodings


@given(data=st.binary(min_size=32, max_size=32))
def test_the_encodings_have_the_lengths_and_alphabets_of_the_documents(data):
    tag = Tag(data)

    assert re.fullmatch(r"ck1_[A-Za-z0-9_-]{32}", encode_native(tag))
    assert base64.urlsafe_b64decode(encode_native(tag)[4:]) == data[:24]
    assert re.fullmatch(r"[0-9a-f]{64}", encode_hex(tag))
    assert bytes.fromhex(encode_hex(tag)) == data


@given(data=st.binary(min_size=32, max_size=32), version=st.sampled_from([4, 5, 8]))
def test_a_uuid_keeps_every_bit_of_the_tag_but_its_version_and_variant(data, version):
    encoded = encode_uuid(Tag(data), version)

    parsed = UUID(encoded)
    assert str(parsed) == encoded
    assert parsed.version == version
    assert parsed.variant == "specified in RFC 4122"
    kept = ~((0xF << 76) | (0x3 << 62))
    assert parsed.int & kept == int.from_bytes(data[:16], "big") & kept


def test_a_uuid_is_of_version_8_unless_a_service_requires_another():
    tag = tag_of(FIRST)

    assert encode_uuid(tag) == encode_uuid(tag, 8) == "62deb1a7-2db8-868b-bd98-de28e534d23f"
    assert encode_uuid(tag, 4) == "62deb1a7-2db8-468b-bd98-de28e534d23f"
    assert encode_uuid(tag, 5) == "62deb1a7-2db8-568b-bd98-de28e534d23f"
    assert encode_hex(tag).startswith("62deb1a72db8268bbd98de28e534d23f")


# --- limits

MAKE = {
    "env": lambda value: outbox.Outbox(KEYRING, env=value),
    "scope": lambda value: outbox.ParentKey("invoice:42", scope=value),
    "source": lambda value: outbox.ParentKey("invoice:42", scope="acct_1", source=value),
    "parent": outbox.ParentKey,
    "operation": lambda value: key_fields("prod", outbox.ParentKey("invoice:42"), value, ""),
    "discriminator": lambda value: key_fields("prod", outbox.ParentKey("invoice:42"), "d", value),
}
FEWEST_AND_MOST = {
    "env": (1, 64),
    "scope": (0, 255),
    "source": (1, 64),
    "parent": (1, 255),
    "operation": (1, 128),
    "discriminator": (0, 255),
}


@pytest.mark.parametrize("field", MAKE)
def test_a_field_of_the_fewest_and_of_the_most_bytes_is_taken(field):
    fewest, most = FEWEST_AND_MOST[field]

    MAKE[field]("x" * fewest)
    MAKE[field]("x" * most)


@pytest.mark.parametrize("field", MAKE)
def test_a_field_of_too_many_bytes_is_refused_by_name_and_size(field):
    fewest, most = FEWEST_AND_MOST[field]

    with pytest.raises(outbox.InvalidValue) as caught:
        MAKE[field]("x" * (most + 1))

    assert str(caught.value).startswith(f"{field} 'xxx")
    assert str(caught.value).endswith(f": has {most + 1} bytes of UTF-8; {fewest} to {most} are allowed")
    assert caught.value.field == field
    assert caught.value.value == "x" * (most + 1)


@pytest.mark.parametrize("field", [field for field, (fewest, _) in FEWEST_AND_MOST.items() if fewest])
def test_an_empty_field_is_refused_where_it_must_not_be(field):
    most = FEWEST_AND_MOST[field][1]

    with pytest.raises(outbox.InvalidValue) as caught:
        MAKE[field]("")

    assert str(caught.value) == f"{field} '': has 0 bytes of UTF-8; 1 to {most} are allowed"


@pytest.mark.parametrize("field", [field for field in MAKE if field != "operation"])
def test_limits_count_bytes_and_not_characters(field):
    most = FEWEST_AND_MOST[field][1]

    MAKE[field]("é" * (most // 2))
    with pytest.raises(outbox.InvalidValue, match=f"has {most + 1 + most % 2} bytes"):
        MAKE[field]("é" * ((most + 1 + most % 2) // 2) + "x" * ((most + 1 + most % 2) % 2))


@pytest.mark.parametrize("field", MAKE)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\0b", r"'a\x00b': contains a NUL character"),
        ("a\ud800", r"'a\ud800': contains a lone surrogate, which UTF-8 cannot encode"),
        (b"bytes", "b'bytes': must be a str, not bytes"),
        (None, "None: must be a str, not NoneType"),
        (42, "42: must be a str, not int"),
    ],
)
def test_what_is_no_clean_text_is_refused(field, value, text):
    with pytest.raises(outbox.InvalidValue) as caught:
        MAKE[field](value)

    assert str(caught.value) == f"{field} {text}"


@pytest.mark.parametrize("name", ["Stripe.create", "a..b", ".a", "a.", "a b", "a-b", "é", "a.b\n", "{a}"])
def test_an_operation_that_is_not_lower_case_words_with_dots_is_refused(name):
    with pytest.raises(outbox.InvalidValue) as caught:
        MAKE["operation"](name)

    assert str(caught.value) == (
        f"operation {name!r}: must be lower-case words joined by dots, e.g. 'stripe.refunds.create'"
    )


@pytest.mark.parametrize("name", ["d", "a.b.c", "s3.put_object", "_", "0"])
def test_lower_case_words_joined_by_dots_are_an_operation(name):
    MAKE["operation"](name)


@pytest.mark.parametrize("source", ["http", "inbox:orders"])
def test_a_scope_may_be_empty_only_for_the_apps_own_keys(source):
    outbox.ParentKey("invoice:42", source="app")

    with pytest.raises(outbox.InvalidValue) as caught:
        outbox.ParentKey("invoice:42", source=source)

    assert str(caught.value) == (f"scope '': may be empty only for source 'app', not {source!r}: give the caller's id")


def test_the_limits_in_the_code_are_those_of_the_specification():
    assert {field: LIMITS[field] for field in FEWEST_AND_MOST} == FEWEST_AND_MOST


# --- The key ring: what it takes, what it refuses, and that it never shows a secret.


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


TOO_SHORT = b"thirty-one bytes: one too few.."
REFUSED = {
    "a short secret": lambda: outbox.Keyring({"k1": TOO_SHORT}),
    "a short secret as text": lambda: outbox.Keyring.from_text(f"k1:{encoded(TOO_SHORT)}"),
    "no base64": lambda: outbox.Keyring.from_text(f"k1:{encoded(TOO_SHORT)}!"),
    "twice": lambda: outbox.Keyring.from_text(",".join([f"k1:{encoded(TOO_SHORT + b'.')}"] * 2)),
    "unknown current": lambda: outbox.Keyring({"k1": TOO_SHORT + b"."}, current="k2"),
    "the environment": configuration_from_environment,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_no_frame_of_a_refusal_holds_the_secret(make, monkeypatch):
    """An error tracker sends the variables of each frame along."""
    monkeypatch.setenv("OUTBOX_SECRET", f"k1:{encoded(TOO_SHORT)}")
    monkeypatch.setenv("OUTBOX_ENV", "prod")

    with pytest.raises(outbox.ConfigurationError) as caught:
        make()

    ours = [frame for frame, _ in traceback.walk_tb(caught.tb) if "/outbox/" in frame.f_code.co_filename]
    variables = repr([frame.f_locals for frame in ours])
    assert ours
    assert leaks(variables + shown(caught.value), TOO_SHORT, TOO_SHORT + b".") == []
