"""Salesforce: records, created or updated by an external id."""

from datetime import date

from dispatchers.adapters.providers.auth import bearer
from dispatchers.adapters.providers.key_places import NaturalKey
from dispatchers.adapters.providers.operations import Patch
from dispatchers.adapters.providers.profile import Profile
from dispatchers.adapters.providers.signals import Signal

salesforce = Profile(
    name="salesforce",
    title="Salesforce",
    as_of=date(2026, 11, 22),
    sources=(
        "https://developer.salesforce.com/docs/atlas.en-us.api_rest.meta/api_rest/dome_upsert.htm",
        "https://github.com/simple-salesforce/simple-salesforce",
    ),
    base_url="https://{instance}.my.salesforce.com/services/data/v{version}",
    auth=bearer("access_token"),
    key=NaturalKey("the value of the external id field"),
    stores="nothing",
    scope="account",
    operations={
        "records.upsert": Patch(
            "/sobjects/{object}/{field}/{value}", success=201, answer={"id": "{id}", "success": True}
        )
    },
    errors=((Signal(300), "rejected"),),
    result=("id", "created"),
    notes=(
        "object, field and value are members of the payload: {'object': 'Account', 'field': 'Key__c', 'value': 'A1'}.",
        "Mark the field as unique: with two records of one value Salesforce answers 300 and changes nothing.",
        "Sent twice it writes the same values twice, even over a change that was made in between.",
    ),
)
