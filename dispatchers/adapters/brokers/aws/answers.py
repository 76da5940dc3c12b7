"""The outcomes of AWS's answers and of botocore's errors. Pure."""

import re
from collections.abc import Mapping
from typing import Any, Final

from botocore import exceptions as botocore_errors

from dispatchers.delivery import Deferred, Outcome, Rejected, Unknown

CODE: Final = re.compile(r"[A-Za-z0-9_.]{1,80}")
THROTTLED: Final = re.compile(r"Throttl|TooManyRequests|LimitExceeded")
REFUSED_FOR_ALL: Final = re.compile(
    r"AccessDenied|NotAuthorized|AuthorizationError|UnrecognizedClient|InvalidClientTokenId|InvalidSecurity|OptInRequired|Kms|KMS"
    r"|ExpiredToken|RequestExpired|InvalidSignature|SignatureDoesNotMatch|IncompleteSignature|MissingAuthenticationToken"
    r"|InvalidAccessKeyId|InvalidAccountId|AuthFailure"
)
"""The credentials, the permissions or the key of the encryption are wrong: the whole destination waits."""
MISSING: Final = re.compile(r"NotFound|NonExistent|DoesNotExist|InvalidAddress|InvalidState")

NO_CREDENTIALS: Final = (
    botocore_errors.NoCredentialsError,
    botocore_errors.PartialCredentialsError,
    botocore_errors.CredentialRetrievalError,
    botocore_errors.TokenRetrievalError,
    botocore_errors.MetadataRetrievalError,
    botocore_errors.SSOError,
)
NO_CONNECTION: Final = (
    botocore_errors.EndpointConnectionError,
    botocore_errors.ConnectTimeoutError,
    botocore_errors.ProxyConnectionError,
)


class NotBegun(Exception):
    """The request was not sent: too little time was left for an answer."""


def outcome_of_error(error: Exception) -> Outcome:
    """The outcome of every entry of a request that raised `error`. The reason names the error and quotes no text of it."""
    name = type(error).__name__
    if isinstance(error, NotBegun):
        return Deferred("nothing was sent: too little of its time was left")
    if isinstance(error, botocore_errors.ClientError):
        return _refused(error)
    if isinstance(error, NO_CREDENTIALS):
        return Deferred(f"nothing was sent, no credentials: {name}", cooldown=True)
    if isinstance(error, NO_CONNECTION):
        return Deferred(f"nothing was sent, no connection: {name}")
    if isinstance(error, botocore_errors.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Deferred("nothing was sent: the certificate is not trusted", cooldown=True)
    if isinstance(error, botocore_errors.ParamValidationError):
        return Rejected("botocore does not take the request's parameters")
    return Unknown(name)


def outcome_of_failure(code: object, *, is_our_fault: bool) -> Outcome:
    """The outcome of one entry that the answer lists as failed."""
    reason = readable(code)
    if THROTTLED.search(reason) or REFUSED_FOR_ALL.search(reason):
        return Deferred(reason, cooldown=True)
    return Rejected(reason) if is_our_fault else Unknown(reason)


def readable(code: object) -> str:
    """The code of an error, if it is one: what a server that is no AWS wrote instead may quote the request."""
    return code if isinstance(code, str) and CODE.fullmatch(code) else "an error without a code"


def remembered(answer: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The named fields of one entry's answer, under our names."""
    return {name: answer[field] for name, field in names.items() if isinstance(answer.get(field), str)}


def _refused(error: botocore_errors.ClientError) -> Outcome:
    response: Mapping[str, Any] = error.response
    code = readable(response.get("Error", {}).get("Code"))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    reason = f"HTTP {status} {code}"
    if status == 429 or THROTTLED.search(code) or status in (401, 403) or REFUSED_FOR_ALL.search(code):
        return Deferred(reason, cooldown=True)
    if status in (400, 404, 409) and MISSING.search(code):
        return Deferred(reason)
    return Rejected(reason) if 400 <= status < 500 else Unknown(reason)
