"""Who dies in a round, and when: each request loses its gateway and its worker at a point of its own, or before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from pdq.client import Client
from pdq.errors import Unavailable

from tests.resume.asking import Asked
from tests.resume.scene import Scene

POLL_S = 0.01
ASK_S = 0.1
"""Between two questions to the log."""


class Deaths:
    """Of the parts that serve some requests. `client`: reads who works on them."""

    def __init__(self, asked: Sequence[Asked], scene: Scene, client: Client, broker_dies: float | None = None) -> None:
        self._asked = [one for one in asked if one.ask.leaves is None]
        self._scene = scene
        self._client = client
        self._broker_dies = broker_dies
        self._one_gateway = asyncio.Lock()

    async def run(self) -> None:
        """Until each has happened, or can no more, as the requests are over."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._broker())
            for one in self._asked:
                group.create_task(self._gateway(one))
                group.create_task(self._decode(one))

    async def _gateway(self, one: Asked) -> None:
        await self._has([one], one.ask.gateway_dies)
        while not one.over and not one.count("broken"):
            async with self._one_gateway:
                # With none there, nobody would see how far the others are.
                await self._scene.gateways_ready()
                async with self._scene.quiet:
                    # While it streams: to kill what has not answered yet cuts nothing.
                    if not one.over and not one.count("broken") and len(one.frames) > one.before:
                        await self._scene.kill_gateway(one.gateway)
            await asyncio.sleep(POLL_S)

    async def _decode(self, one: Asked) -> None:
        await self._has([one], one.ask.decode_dies)
        while not one.over and not one.lost_decode:
            async with self._scene.quiet:
                if not one.lost_decode and (worker := await self._worker(one)):
                    await self._kill_decode(worker)
            await asyncio.sleep(ASK_S)

    async def _kill_decode(self, worker: str) -> None:
        for other in self._asked:
            other.lost_decode |= bool(other.frames) and await self._worker(other) == worker
        await self._scene.kill_decode(worker)

    async def _worker(self, one: Asked) -> str:
        """Who decodes it; of several choices, the first that is being decoded."""
        for request in one.requests:
            try:
                state = await self._client.state(request)
            except Unavailable:
                return ""
            if state is not None and not state.ended and state.event in ("claim", "cancelling"):
                return state.decode.owner
        return ""

    async def _broker(self) -> None:
        if self._broker_dies is not None:
            await self._has(self._asked, self._broker_dies)
            async with self._scene.quiet:
                await self._scene.kill_broker()

    async def _has(self, asked: Sequence[Asked], share: float) -> None:
        """Until the requests have so much of their answers, or are over."""
        while fmean(one.share for one in asked) < share:
            await asyncio.sleep(POLL_S)
