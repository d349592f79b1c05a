"""TLS to a real broker: who is not trusted is refused at once, on either side, and told why."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pdq.bus import Bus
from pdq.client import Client
from pdq.errors import Misconfigured
from pdq.settings import BusSettings

from tests.ask import ask
from tests.broker import Broker
from tests.certificates import Authority
from tests.secured import SecuredStack
from tests.stack import chat

BOUND_S = 5.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(directory: Path) -> Authority:
    return Authority(directory, "ours")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Authority:
    return Authority(directory, "theirs")


def tls(authority: Authority, *, host: str = "127.0.0.1", verify: bool = False) -> str:
    """The broker's block."""
    server = authority.sign(f"server-{host}", host=host)
    files = {"cert_file": server.cert, "key_file": server.key, "ca_file": authority.file}
    return f"tls: {msgspec.json.encode({**files, 'verify': verify}).decode()}\n"


@pytest.fixture(scope="module")
def broker(directory: Path, ours: Authority) -> Iterator[Broker]:
    yield from _started(directory / "plain", tls(ours))


@pytest.fixture(scope="module")
def verifying(directory: Path, ours: Authority) -> Iterator[Broker]:
    """Asks clients for a certificate."""
    yield from _started(directory / "verify", tls(ours, verify=True))


def _started(directory: Path, more: str) -> Iterator[Broker]:
    directory.mkdir()
    broker = Broker(directory)
    broker.more = more
    broker.start()
    yield broker
    broker.stop()


async def connect(broker: Broker, **given: str) -> None:
    """Connect, say something, close."""
    bus = await Bus.connect(BusSettings(url=broker.url, connect_timeout_s=BOUND_S, **given), "test")
    await bus.flush()
    await bus.close()


async def test_a_trusted_broker_is_spoken_to(broker: Broker, ours: Authority) -> None:
    await connect(broker, tls_ca=ours.file)


async def test_a_broker_of_another_authority_is_not(broker: Broker, theirs: Authority) -> None:
    began = time.monotonic()
    with pytest.raises(Misconfigured, match="not trusted .*PDQ_NATS_TLS_CA"):
        await connect(broker, tls_ca=theirs.file)
    assert time.monotonic() - began < BOUND_S


async def test_nor_is_one_that_the_system_does_not_know(broker: Broker) -> None:
    with pytest.raises(Misconfigured, match="not trusted"):
        await connect(broker)


async def test_nor_is_one_of_another_address(tmp_path: Path, ours: Authority) -> None:
    for broker in _started(tmp_path / "other", tls(ours, host="10.0.0.1")):
        with pytest.raises(Misconfigured, match="not trusted"):
            await connect(broker, tls_ca=ours.file)


@pytest.mark.parametrize("given", [{"tls_ca": "ours"}, {"scheme": "tls"}])
async def test_nothing_is_said_to_a_broker_without_tls(ours: Authority, given: dict[str, str]) -> None:
    heard = bytearray()

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.15.1","headers":true,"max_payload":1048576,"nonce":"abc"}\r\n')
        heard.extend(await reader.read(100))
        writer.close()

    async with await asyncio.start_server(broker, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = BusSettings(
            url=f"{given.get('scheme', 'nats')}://127.0.0.1:{port}",
            tls_ca=ours.file if "tls_ca" in given else "",
            user="me",
            password="secret",
        )
        with pytest.raises(Misconfigured, match="has no TLS"):
            await Bus.connect(settings, "test")
    assert not heard


async def test_a_client_with_a_certificate_is_let_in(verifying: Broker, ours: Authority) -> None:
    client = ours.sign("client")
    await connect(verifying, tls_ca=ours.file, tls_cert=client.cert, tls_key=client.key)


@pytest.mark.parametrize("kind", ["none", "another authority's", "expired"])
async def test_a_client_without_a_valid_one_is_not(
    verifying: Broker, ours: Authority, theirs: Authority, kind: str
) -> None:
    given = {"tls_ca": ours.file}
    if kind != "none":
        left = datetime.timedelta(days=-1) if kind == "expired" else datetime.timedelta(days=1)
        client = (theirs if kind == "another authority's" else ours).sign("refused", left=left)
        given |= {"tls_cert": client.cert, "tls_key": client.key}
    began = time.monotonic()
    with pytest.raises(Misconfigured, match="refuses the TLS connection"):
        await connect(verifying, **given)
    assert time.monotonic() - began < BOUND_S + 5


@pytest.mark.parametrize(("name", "value"), [("tls_ca", "/no/such.pem"), ("tls_cert", "/no/such.pem")])
async def test_a_file_that_is_not_there_is_named(broker: Broker, name: str, value: str) -> None:
    with pytest.raises(Misconfigured, match=r"PDQ_NATS_TLS_\*: /no/such.pem: No such file"):
        await connect(broker, **{name: value})


async def test_a_whole_stack_speaks_tls(tmp_path: Path, ours: Authority) -> None:
    client = ours.sign("service")
    files = {"PDQ_NATS_TLS_CA": ours.file, "PDQ_NATS_TLS_CERT": client.cert, "PDQ_NATS_TLS_KEY": client.key}
    stack = SecuredStack(tmp_path, ("acme",), **files)
    stack.broker.more += tls(ours, verify=True)
    for module in ("pdq_router", "pdq_worker"):
        stack.add(module)
    try:
        await stack.start()
        bus = await stack.connect("acme")
        answer = await ask(Client(bus, "acme"), chat("hello", max_tokens=8))
        assert answer.terminal == ["finished"]
        await bus.close()
    finally:
        stack.stop()
