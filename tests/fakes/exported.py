"""What a running gateway exports, as a test asks for it."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


async def exported(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Samples of a gateway, by name and labels that are not the same everywhere: `name/value/…`."""
    async with http.get(url + "/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found["/".join([sample.name, *rest])] = sample.value
    return found
