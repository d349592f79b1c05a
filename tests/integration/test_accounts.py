"""Accounts and roles on a real broker: with their own keys everybody does his work, and nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pdq import operators
from pdq.client import Client, new_request_id

from tests.ask import ask, read_all
from tests.secured import SecuredStack
from tests.stack import MODEL, chat

TENANTS = ("acme", "globex")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    """Shared by the tests of this module, none of which may break it."""
    stack = SecuredStack(tmp_path_factory.mktemp("secured"), TENANTS)
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture
async def acme(stack: SecuredStack) -> AsyncIterator[Client]:
    bus = await stack.connect("acme")
    yield Client(bus, "acme")
    await bus.close()


def pdq(stack: SecuredStack, name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdq", *arguments],
        env=stack.command(name, **more),
        capture_output=True,
        text=True,
        timeout=60,
    )


# ---- with their own keys all do their work


@pytest.mark.parametrize("order", ["prefill-first", "decode-first", "decode-only"])
async def test_a_tenant_is_answered(stack: SecuredStack, acme: Client, order: str) -> None:
    answer = await ask(acme, chat("hello", max_tokens=20, ignore_eos=True), order=order)
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 20
    again = await read_all(acme, answer.request)
    assert again.transcript.digest() == answer.transcript.digest()
    cancelled = await acme.cancel(answer.request)
    assert cancelled.state is not None and cancelled.state.event == "finished"
