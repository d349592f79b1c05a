"""Work for a client that may leave, in a service that may stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pdq_gateway.leaving import ClientLeft, Stopping, while_wanted


class Asking:
    """A client that leaves when told to, and what became of the work for it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.over = asyncio.Event()
        self.answered = False
        self.tidied = False

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def work() -> None:
            try:
                await body()
            finally:
                await asyncio.sleep(0)
                self.tidied = True

        await while_wanted(work(), self.receive, lambda: self.answered, self.over)


async def test_work_that_ends_is_all_there_is() -> None:
    asking = Asking()
    await asking.run(lambda: asyncio.sleep(0))
    assert asking.tidied


async def test_its_errors_come_through() -> None:
    async def failing() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError):
        await Asking().run(failing)


async def test_a_client_that_leaves_stops_it() -> None:
    asking = Asking()
    asyncio.get_running_loop().call_soon(asking.left.set)
    with pytest.raises(ClientLeft):
        await asking.run(asyncio.Event().wait)  # type: ignore[arg-type]
    assert asking.tidied


async def test_the_end_of_the_drain_time_stops_it() -> None:
    asking = Asking()
    asyncio.get_running_loop().call_soon(asking.over.set)
    with pytest.raises(Stopping):
        await asking.run(asyncio.Event().wait)  # type: ignore[arg-type]
    assert asking.tidied


async def test_after_the_answer_nobody_leaves() -> None:
    """A server tells of a complete answer as of a client that left; there is still something to tidy up then."""
    asking = Asking()

    async def answering() -> None:
        asking.answered = True
        asking.left.set()
        for _ in range(10):
            await asyncio.sleep(0)

    await asking.run(answering)
    assert asking.tidied


async def test_a_cancelled_task_is_no_client_that_left() -> None:
    asking = Asking()
    task = asyncio.create_task(asking.run(asyncio.Event().wait))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asking.tidied
