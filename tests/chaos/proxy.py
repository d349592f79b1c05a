"""A TCP proxy between one process and the broker, which breaks the connection in the ways that networks do."""

from __future__ import annotations

import asyncio
import contextlib

CHUNK = 1 << 16
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """Listens on a free port of the loopback; `start`, then `url`; `close` at the end.

    One fault at a time: `cut` closes all connections and refuses new ones; `silent` loses every byte in both
    directions, with no word to either side; `delay` holds each piece back. `heal` ends it; connections that
    lost bytes are closed then.
    """

    def __init__(self, broker_port: int) -> None:
        self.port = 0
        self._broker_port = broker_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._cut = False
        self._silent = False
        self._delay_s = 0.0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def healthy(self) -> bool:
        return not (self._cut or self._silent or self._delay_s)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._abort_all()

    def cut(self) -> None:
        self._cut = True
        self._abort_all()

    def silent(self) -> None:
        self._silent = True

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def heal(self) -> None:
        if self._silent:
            self._abort_all()
        self._cut, self._silent, self._delay_s = False, False, 0.0

    def _abort_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._cut:
                return
            if self._silent:
                await self._swallow(reader)
                return
            await self._join((reader, writer))
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(CHUNK):
            pass

    async def _join(self, inner: Streams) -> None:
        outer = await asyncio.open_connection("127.0.0.1", self._broker_port)
        self._writers.add(outer[1])
        pumps = [asyncio.create_task(self._pump(*pair)) for pair in ((inner[0], outer[1]), (outer[0], inner[1]))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers.discard(outer[1])
            outer[1].transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if not self._silent:
                    writer.write(data)
                    await writer.drain()
