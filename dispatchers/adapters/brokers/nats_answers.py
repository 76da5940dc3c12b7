"""The outcomes of NATS JetStream's answers, and the subjects and streams that the adapter may publish to. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Final

from nats.js.api import RetentionPolicy, StreamConfig

from dispatchers.delivery import Deferred, Delivered, InProgress, Outcome, Rejected, Unknown

NO_RESPONDERS: Final = "503"

REJECTED: Final = frozenset({10054, 10097})
"""The message is larger than the stream allows; so are its headers."""

DEFERRED: Final = frozenset({10039, 10053, 10059, 10060, 10076, 10109, 10118, 10194})
"""Checked before a message is stored: the stream's limits, JetStream not enabled, another stream than expected, a sealed or an
offline stream. Source: nats-server, server/errors.json; processClusteredInboundMsg in jetstream_cluster.go."""

IN_PROCESS: Final = 10158
NO_ROOM: Final = {10002: "the account has reached its limits", 10023: "the server has no room"}
"""Limits of stored bytes. A server checks them before it proposes a message to the replicas. An older one checks them afterwards
too: it drops the message, and the replicas keep it. Source: processClusteredInboundMsg in jetstream_cluster.go,
processJetStreamMsg in stream.go; seen with nats-server 2.9.10."""
STORE_FAILED: Final = 10077
SUBJECT_FULL: Final = "maximum messages per subject exceeded"
FULL: Final = (
    "maximum messages exceeded",
    "maximum bytes exceeded",
    SUBJECT_FULL,
    "message size exceeds maximum allowed",
)
"""A stream with `discard: new` is full. Each replica refuses such a message before it writes. Source: server/store.go."""

MAX_SUBJECT_BYTES: Final = 3_500
"""A server ends the connection after a command of more than 4,096 bytes without the message (its `max_control_line`)."""

API: Final = frozenset({"$JS", "$SYS"})
"""The first token of subjects on which a server takes commands, such as one that deletes a stream."""


def answer_reader(stream: str, replicas: int | None) -> Callable[[Mapping[str, str] | None, bytes], Outcome]:
    """A function that returns the outcome for the headers and the data of an answer to a publication.

    replicas: of the stream.
    """
    name = re.escape(json.dumps(stream).encode())
    usual = re.compile(rb'\{"stream":%s, ?"seq":([1-9][0-9]{0,18})\}' % name)
    match = usual.fullmatch  # nearly every answer: to parse it as JSON takes five times as long

    def outcome(headers: Mapping[str, str] | None, data: bytes) -> Outcome:
        stored = match(data)
        if stored is None:
            return _unusual(headers, data, stream, replicas)
        return Delivered({"stream": stream, "seq": int(stored[1])})

    return outcome


def _unusual(headers: Mapping[str, str] | None, data: bytes, stream: str, replicas: int | None) -> Outcome:
    """The outcome for any answer.

    Whatever the server does not exclude may have happened: an error after the message was proposed to the replicas, or an answer
    that is no PubAck.
    """
    if headers and headers.get("Status") == NO_RESPONDERS:
        return Deferred("no stream takes messages of this subject now")
    try:
        answer = json.loads(data)
        if "error" in answer:
            code, description = int(answer["error"].get("err_code", 0)), str(answer["error"].get("description", ""))
            return _refused(code, description, replicas)
        if answer["stream"] != stream:
            return Unknown("another stream than expected has answered", final=True)
        sequence, duplicate = int(answer.get("seq", 0)), answer.get("duplicate") is True
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unknown("the answer is no PubAck")
    if sequence == 0:  # older servers: the first message with this id waits for the replicas, and may yet fail
        return InProgress() if duplicate else Unknown("the answer is no PubAck")
    return Delivered({"stream": stream, "seq": sequence}, replayed=duplicate)


def _refused(code: int, description: str, replicas: int | None) -> Outcome:
    reason = f"JetStream error {code}"
    if code == IN_PROCESS:
        return InProgress()
    if code in REJECTED:
        return Rejected(f"{reason}: the message or its headers are larger than the stream allows")
    if code == STORE_FAILED and description in FULL:
        return Deferred(f"{reason}: the stream is full", cooldown=description != SUBJECT_FULL)
    if code in NO_ROOM:
        reason = f"{reason}: {NO_ROOM[code]}"
        return Deferred(reason, cooldown=True) if replicas == 1 else Unknown(reason, cooldown=True)
    return Deferred(reason) if code in DEFERRED else Unknown(reason)


@lru_cache(maxsize=1024)
def unfit_subject(subject: str) -> str | None:
    """Why no message can be published to this subject, or None."""
    tokens = subject.split(".")
    if not all(tokens) or not set(" \t\r\n").isdisjoint(subject):
        return "the subject has an empty token or a space"
    if "*" in tokens or ">" in tokens:
        return "the subject has a wildcard"
    if tokens[0] in API:
        return f"the subject belongs to the API of the server ({tokens[0]})"
    if len(subject.encode()) > MAX_SUBJECT_BYTES:
        return f"the subject is longer than {MAX_SUBJECT_BYTES} bytes"
    return None


def unfit(config: StreamConfig, window: timedelta | None) -> str | None:
    """Why the adapter must not publish to a stream of this configuration, or None.

    A stream finds its ids again in its stored messages when a server restarts. So a stream that deletes messages once they are
    consumed forgets their ids. Source: nats-server, rebuildDedupe in server/stream.go.
    """
    if config.no_ack:
        return "it confirms no message (no_ack)"
    if config.mirror is not None:
        return "it is a mirror: publish to the stream that it mirrors"
    if window is None:
        return None
    if config.retention not in (None, RetentionPolicy.LIMITS):
        return f"its retention {config.retention!s} deletes messages, and with them their ids: declare window=None"
    remembered = timedelta(seconds=config.duplicate_window or 0)
    if remembered < window:
        return f"it remembers ids for {remembered}, and the adapter declares {window}"
    return None
