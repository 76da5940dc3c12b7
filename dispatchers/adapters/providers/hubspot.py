"""HubSpot: CRM records, created or updated by a unique property."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import NaturalKey
from dispatchers.adapters.providers.operations import Post
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal

UPSERTED = {"status": "COMPLETE", "results": [{"id": "{id}"}]}

hubspot = Profile(
    name="hubspot",
    title="HubSpot",
    as_of=date(2026, 11, 22),
    sources=("https://developers.hubspot.com/docs/api-reference/crm-contacts-v3/batch/upsert",),
    base_url="https://api.hubapi.com",
    auth=bearer("access_token"),
    key=NaturalKey("each input's id: the value of the unique property that its idProperty names"),
    stores="nothing",
    scope="account",
    operations={
        "contacts.upsert": Post("/crm/v3/objects/contacts/batch/upsert", answer=UPSERTED),
        "companies.upsert": Post("/crm/v3/objects/companies/batch/upsert", answer=UPSERTED),
        "deals.upsert": Post("/crm/v3/objects/deals/batch/upsert", answer=UPSERTED),
        "tickets.upsert": Post("/crm/v3/objects/tickets/batch/upsert", answer=UPSERTED),
        "objects.upsert": Post("/crm/v3/objects/{object_type}/batch/upsert", answer=UPSERTED),
    },
    errors=((Signal(207), "final"),),
    result=("results[].id",),
    error=("category", "errors[].category"),
    notes=(
        "Sent twice it writes the same values twice, even over a change that was made in between.",
        "After HTTP 207 some inputs are written and others are not: correct these, and send all again.",
    ),
)
