"""A short storm on every kind of Redis; `make chaos` makes long ones."""

from __future__ import annotations

import pytest

from tests.chaos.storm import Forecast, Storm

pytestmark = pytest.mark.chaos


@pytest.mark.redis
@pytest.mark.every_redis
async def test_a_storm_loses_no_request_and_no_token(redis_kind: str) -> None:
    forecast = Forecast(seed=7, num_requests=100, num_faults=16, limit_s=240, kind=redis_kind)
    report = await Storm(forecast).run()
    assert report.violations == []
    assert report.num_requests >= forecast.num_requests
    assert sum(report.faults.values()) >= forecast.num_faults
