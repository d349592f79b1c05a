"""What docs/operations.md says of the broker's own keys, on a real one."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Misconfigured
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker
from tests.certificates import Authority, Pair
from tests.stack import MODEL

OLD, NEW = {"OLD": "the-old-key"}, {"NEW": "the-new-key"}


async def stored(directory: Path, keys: str, environment: dict[str, str]) -> int:
    """Start a broker on a store, keep one message more, and return how many there are; 0: it has no streams."""
    broker = Broker(directory)
    broker.jetstream = f'cipher: "chachapoly"\n{keys}'
    broker.environment = environment
    broker.start()
    try:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        if await bus.stream_info(subjects.LOG) is None:
            if environment != OLD:
                return 0
            await init(bus, LimitSettings(), [MODEL])
        await bus.publish(subjects.state("local", "kept"), b"{}")
        info = await bus.stream_info(subjects.LOG)
        await bus.close()
        assert info is not None
        return int(info["state"]["messages"])
    finally:
        broker.stop()


async def test_the_key_of_a_store_is_replaced_by_two_restarts(tmp_path: Path) -> None:
    assert await stored(tmp_path, "key: $OLD\n", OLD) == 1
    assert await stored(tmp_path, "key: $NEW\nprev_key: $OLD\n", {**OLD, **NEW}) == 2
    assert await stored(tmp_path, "key: $NEW\n", NEW) == 3


async def test_a_store_does_not_take_a_new_key_alone(tmp_path: Path) -> None:
    assert await stored(tmp_path, "key: $OLD\n", OLD) == 1
    assert await stored(tmp_path, "key: $NEW\n", NEW) == 0


async def test_pdq_init_is_a_loss_while_the_key_is_wrong(tmp_path: Path) -> None:
    """Of nats-server 2.15.1; docs/backup.md warns of it for as long as this passes."""
    assert await stored(tmp_path, "key: $OLD\n", OLD) == 1
    broker = Broker(tmp_path)
    broker.jetstream, broker.environment = 'cipher: "chachapoly"\nkey: $NEW\n', NEW
    broker.start()
    try:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        with pytest.raises(Misconfigured, match="error creating store"):
            await init(bus, LimitSettings(), [MODEL])
        await bus.close()
    finally:
        broker.stop()
    assert await stored(tmp_path, "key: $OLD\n", OLD) == 1, "what was kept is there: the warning can go"


def shown(port: int, ours: Authority) -> bytes:
    """The certificate that a broker shows."""
    trust = ssl.create_default_context(cafile=ours.file)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        assert plain.recv(4096).startswith(b"INFO")
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
            return secure.getpeercert(binary_form=True) or b""


async def test_a_certificate_is_replaced_by_a_reload(tmp_path: Path) -> None:
    """Connections stay; new ones are shown the new certificate."""
    ours = Authority(tmp_path, "ours")
    pair: Pair = ours.sign("server")
    broker = Broker(tmp_path)
    broker.more = f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}" }}\n'
    broker.start()
    lost = asyncio.Event()
    try:
        before = await asyncio.to_thread(shown, broker.port, ours)
        bus = await Bus.connect(BusSettings(url=f"tls://127.0.0.1:{broker.port}", tls_ca=ours.file), "test")
        bus.on_disconnect(lost.set)
        ours.sign("server")
        assert broker.process is not None
        broker.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while await asyncio.to_thread(shown, broker.port, ours) == before:
                await asyncio.sleep(0.05)
        await bus.flush()
        assert not lost.is_set()
        await bus.close()
    finally:
        broker.stop()
