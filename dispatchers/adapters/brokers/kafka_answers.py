"""The outcomes of the answers of Kafka and of librdkafka. Pure."""

from typing import Any, Final

from confluent_kafka import KafkaError

from dispatchers.delivery import Deferred, Delivered, Outcome, Rejected, Unknown

REJECTED: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,  # no legal name of a topic
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    }
)
"""The broker, or librdkafka before it, refuses this record and would refuse it later too."""

REFUSED_FOR_ALL: Final = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.INVALID_REQUIRED_ACKS,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
    }
)
"""The credentials or the settings are wrong: the whole destination waits."""

DEFERRED: Final = frozenset(
    {
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._PURGE_QUEUE,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
    }
)
"""Checked before a record is appended, or never sent. Source: kafka/core, ReplicaManager.appendRecords."""


def not_accepted(error: Any) -> Outcome:
    """The outcome if librdkafka did not take the record into its queue, or found no topic for it: nothing was sent."""
    reason = f"nothing was sent: {name_of(error)}"
    code = error.code() if isinstance(error, KafkaError) else None
    if code in REJECTED:
        return Rejected(reason)
    return Deferred(reason, cooldown=code in REFUSED_FOR_ALL)


def unreachable(error: KafkaError) -> Outcome:
    """The outcome if no broker answered. error: why a connection failed."""
    return Deferred(f"nothing was sent, no connection: {name_of(error)}", cooldown=error.code() in REFUSED_FOR_ALL)


def not_delivered(error: KafkaError, *, may_be_repeated: bool) -> Outcome:
    """The outcome for a record that librdkafka reports as failed.

    may_be_repeated: this may be the answer to a repetition, after a failed connection or after an answer such as
        NOT_ENOUGH_REPLICAS_AFTER_APPEND. The broker may have appended the record before. librdkafka's Python client does not
        report which.
    """
    reason = name_of(error)
    if may_be_repeated or error.fatal():
        return Unknown(reason)
    if error.code() in REJECTED:
        return Rejected(reason)
    if error.code() in REFUSED_FOR_ALL | DEFERRED:
        return Deferred(reason, cooldown=error.code() in REFUSED_FOR_ALL)
    return Unknown(reason)


def delivered(topic: str, partition: int | None, offset: int | None) -> Outcome:
    """offset: unknown if the broker recognised a repetition of librdkafka's."""
    known = offset if offset is not None and offset >= 0 else None
    return Delivered({"topic": topic, "partition": partition, "offset": known})


def name_of(error: Any) -> str:
    """The error's name alone: its text may quote addresses or the settings."""
    return str(error.name()) if isinstance(error, KafkaError) else type(error).__name__


PERHAPS_TOO_LARGE_TOGETHER: Final = tuple(
    Rejected(name_of(KafkaError(code))) for code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)
)
"""A broker's limits are for a whole batch, such as `max.message.bytes` of a topic: each record may be small enough alone."""
