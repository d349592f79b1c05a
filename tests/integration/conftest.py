"""Fixtures of the integration tests: a real broker, and stacks of real services with the sim engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pdq.bus import Bus
from pdq.client import Client
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker
from tests.stack import MODEL, Stack


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


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Router, prefill and decode; shared by the tests of a module, none of which may break it."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    bus = await stack.connect()
    yield Client(bus, "local")
    await bus.close()
