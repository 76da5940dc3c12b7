"""The outside services by name. Each profile is data: what the service guarantees about keys, dated and with its sources.

    from dispatchers.adapters.providers import resend

    Dispatcher(..., adapters={"resend": resend(api_key=os.environ["RESEND_API_KEY"])})

    outbox.enqueue(session, "resend.emails.send", {"from": ..., "to": ..., "subject": ..., "html": ...}, ...)

After the service's name, the operation is one of the profile's, and the payload is the service's own JSON. An id in the URL is
a member of the payload too: {"payment_id": "pay_1", "amount": 500}.
"""

from collections.abc import Mapping
from typing import Final

from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.resend import resend
from dispatchers.adapters.providers.sendgrid import sendgrid

__all__ = ["PROVIDERS", "Profile", "resend", "sendgrid"]

PROVIDERS: Final[Mapping[str, Profile]] = {each.name: each for each in (resend, sendgrid)}
"""All profiles of this release, by name."""
