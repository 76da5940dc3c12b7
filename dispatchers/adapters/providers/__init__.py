"""The outside services by name. Each profile is data: what the service guarantees about keys, dated and with its sources.

    from dispatchers.adapters.providers import resend

    Dispatcher(..., adapters={"resend": resend(api_key=os.environ["RESEND_API_KEY"])})

    outbox.enqueue(session, "resend.emails.send", {"from": ..., "to": ..., "subject": ..., "html": ...}, ...)

After the service's name, the operation is one of the profile's, and the payload is the service's own JSON. An id in the URL is
a member of the payload too: {"payment_id": "pay_1", "amount": 500}. The other names are the parts of a profile of your own.
"""

from collections.abc import Mapping
from typing import Final

from dispatchers.adapters.providers.adyen import adyen
from dispatchers.adapters.providers.auth import Auth, basic, bearer, in_header
from dispatchers.adapters.providers.braintree import braintree
from dispatchers.adapters.providers.brevo import brevo
from dispatchers.adapters.providers.checkout_com import checkout_com
from dispatchers.adapters.providers.gocardless import gocardless
from dispatchers.adapters.providers.hubspot import hubspot
from dispatchers.adapters.providers.key_places import (
    BodyField,
    GraphQLArgument,
    Header,
    Mark,
    NaturalKey,
    NoKey,
    QueryField,
)
from dispatchers.adapters.providers.klarna import klarna
from dispatchers.adapters.providers.mailgun import mailgun
from dispatchers.adapters.providers.modern_treasury import modern_treasury
from dispatchers.adapters.providers.mollie import mollie
from dispatchers.adapters.providers.onesignal import onesignal
from dispatchers.adapters.providers.operations import Delete, Operation, Patch, Post, Put
from dispatchers.adapters.providers.paypal import paypal
from dispatchers.adapters.providers.plaid import plaid
from dispatchers.adapters.providers.postmark import postmark
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.razorpay import razorpay
from dispatchers.adapters.providers.resend import resend
from dispatchers.adapters.providers.salesforce import salesforce
from dispatchers.adapters.providers.sendgrid import sendgrid
from dispatchers.adapters.providers.shopify import shopify
from dispatchers.adapters.providers.signals import Duplicate, Signal
from dispatchers.adapters.providers.slack import slack
from dispatchers.adapters.providers.square import square
from dispatchers.adapters.providers.twilio import twilio
from dispatchers.adapters.providers.wise import wise
from dispatchers.delivery import KeyFormat

__all__ = [
    "PROVIDERS",
    "Auth",
    "BodyField",
    "Delete",
    "Duplicate",
    "GraphQLArgument",
    "Header",
    "KeyFormat",
    "Mark",
    "NaturalKey",
    "NoKey",
    "Operation",
    "Patch",
    "Post",
    "Profile",
    "Put",
    "QueryField",
    "Signal",
    "adyen",
    "basic",
    "bearer",
    "braintree",
    "brevo",
    "checkout_com",
    "gocardless",
    "hubspot",
    "in_header",
    "klarna",
    "mailgun",
    "modern_treasury",
    "mollie",
    "onesignal",
    "paypal",
    "plaid",
    "postmark",
    "razorpay",
    "resend",
    "salesforce",
    "sendgrid",
    "shopify",
    "slack",
    "square",
    "twilio",
    "wise",
]

PROVIDERS: Final[Mapping[str, Profile]] = {
    each.name: each
    for each in (
        adyen,
        braintree,
        brevo,
        checkout_com,
        gocardless,
        hubspot,
        klarna,
        mailgun,
        modern_treasury,
        mollie,
        onesignal,
        paypal,
        plaid,
        postmark,
        razorpay,
        resend,
        salesforce,
        sendgrid,
        shopify,
        slack,
        square,
        twilio,
        wise,
    )
}
"""All profiles of this release, by name."""
