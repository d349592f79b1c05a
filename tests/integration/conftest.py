"""Fixtures of the integration tests: a real broker, and a Bus on which `pdq init` has run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pdq.bus import Bus
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings
from tests.broker import Broker

MODEL = "sim"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def limits() -> LimitSettings:
    return LimitSettings()


@pytest.fixture
async def bus(broker: Broker, limits: LimitSettings) -> AsyncIterator[Bus]:
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    await init(bus, limits, [MODEL])
    yield bus
    await bus.close()
