"""A short storm on every kind of Redis; `make chaos` makes long ones."""

from __future__ import annotations

import pytest

from tests.chaos.storm import Forecast, Storm
from tests.fakes.redis_server import find_binary

pytestmark = pytest.mark.chaos


@pytest.mark.redis
@pytest.mark.every_redis
async def test_a_storm_loses_no_request_and_no_token(redis_kind: str) -> None:
    forecast = Forecast(seed=7, num_requests=100, num_faults=16, limit_s=240, kind=redis_kind)
    report = await Storm(forecast).run()
    assert report.violations == []
    assert report.num_requests >= forecast.num_requests
    assert sum(report.faults.values()) >= forecast.num_faults


@pytest.mark.redis
@pytest.mark.parametrize(
    ("num_requests", "num_faults"), [(60, 8), pytest.param(1000, 60, marks=pytest.mark.long)]
)
async def test_a_storm_over_sentinels_loses_no_request_and_no_token(
    num_requests: int, num_faults: int
) -> None:
    """Three servers, whose primary is killed and frozen: what a replica lacks is brought back."""
    if find_binary("redis") is None:
        pytest.skip("needs a redis-server")
    forecast = Forecast(
        seed=3,
        num_requests=num_requests,
        num_faults=num_faults,
        limit_s=1200,
        kind="redis",
        has_sentinels=True,
    )
    report = await Storm(forecast).run()
    assert report.violations == []
    assert report.num_requests >= num_requests
    assert report.num_failovers > 0
