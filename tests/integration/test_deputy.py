"""The confused deputy: a request whose reply subject is somebody else's. The broker writes the answer, and it may write
anywhere. Accounts keep it from doing so; the same rights within one account do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from pdq.accounts.config import rights_of
from pdq.accounts.roles import Imports, asking, tenant
from pdq.bus import Bus
from pdq.client import Client
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.ask import ask
from tests.broker import Broker
from tests.secured import Peer, SecuredStack
from tests.stack import MODEL, chat

VICTIM = "globex"
TARGETS = [
    f"pdq.log.{VICTIM}.r.state",
    f"pdq.log.{VICTIM}.r.out",
    f"pdq.live.{VICTIM}.r.state",
    f"pdq.cancel.{VICTIM}.r",
    f"pdq.purge.{VICTIM}.r",
    f"pdq.submit.{VICTIM}.{MODEL}",
    f"pdq.prefill.{MODEL}.high.{VICTIM}.r",
    f"pdq.decode.{MODEL}.high.{VICTIM}.r",
    f"pdq.dead.decode.{MODEL}.{VICTIM}.r",
    f"pdq.reap.due.{VICTIM}.r",
    "pdq.ctl.w1.drain",
    "$KV.PDQ_TENANTS.tenants.acme",
    "$KV.PDQ_WORKERS.decode.sim.w1",
    "$JS.API.STREAM.PURGE.PDQ_LOG",
    "_INBOX.victim",
]
"""Where nobody outside the services may make anything be written. (`$JS.ACK.…` is a reply subject to no broker.)"""

QUESTIONS = {
    "acme": [(f"pdq.submit.acme.{MODEL}", chat("x")), ("pdq.read.acme.r", b"{}"), ("pdq.cancel.acme.r", b"")],
    "TENANT_acme": [(f"pdq.submit.acme.{MODEL}", chat("x")), ("pdq.read.acme.r", b"{}")],
    "gateway": [(f"pdq.submit.acme.{MODEL}", chat("x")), ("pdq.read.acme.r", b"{}")],
    "GATEWAY": [(f"pdq.submit.acme.{MODEL}", chat("x"))],
    "monitor": [("$JS.API.STREAM.INFO.PDQ_LOG", b""), ("$JS.API.DIRECT.GET.KV_PDQ_WORKERS", b'{"seq":1}')],
    "MONITOR": [("$JS.API.STREAM.INFO.PDQ_LOG", b"")],
    "operator": [("$JS.API.DIRECT.GET.PDQ_DEAD", b'{"seq":1}'), ("pdq.read.acme.r", b"{}")],
    "init": [("$JS.API.STREAM.INFO.PDQ_LOG", b"")],
}
"""What each may ask, and would have answered elsewhere."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    observed = ("PDQ", "TENANT_globex", "TENANT_acme", "GATEWAY", "MONITOR")
    stack = SecuredStack(tmp_path_factory.mktemp("deputy"), ("acme", VICTIM), observed=observed)
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture
async def everywhere(stack: SecuredStack) -> AsyncIterator[list[Peer]]:
    """Who hears everything in the account of the services, and everything in the victim's."""
    peers = [await stack.peer(account) for account in ("PDQ", "TENANT_globex")]
    for peer in peers:
        await peer.listen(">")
    yield peers
    for peer in peers:
        await peer.client.close()


@pytest.mark.parametrize("who", QUESTIONS)
async def test_an_answer_goes_to_nobody_else(stack: SecuredStack, everywhere: list[Peer], who: str) -> None:
    attacker = await stack.peer(who)
    for question, body in QUESTIONS[who]:
        for target in TARGETS:
            await attacker.publish(question, body, reply=target)
    await attacker.client.close()
    # Its questions were heard, and answered.
    questions = {question for question, _ in QUESTIONS[who]}
    await until(lambda: questions <= {message.subject for message in everywhere[0].heard})
    await until(lambda: any(message.subject.startswith("_R_.") for message in everywhere[0].heard))
    await asyncio.sleep(0.3)
    for peer in everywhere:
        await peer.settle()
        # The gateway's own request makes the services write; nothing of that is of the victim.
        assert not [message.subject for message in peer.heard if message.subject in TARGETS]


async def test_the_victim_is_answered_all_the_same(stack: SecuredStack) -> None:
    bus = await stack.connect(VICTIM)
    answer = await ask(Client(bus, VICTIM), chat("hello", max_tokens=8), request="r")
    assert answer.terminal == ["finished"]
    await bus.close()


# ---- controls: the same rights within one account


@pytest.fixture
async def one_account(tmp_path: Path) -> AsyncIterator[Broker]:
    """A broker where tenant, monitor and services share the account; each has just the subjects it may use."""
    users = [{"user": "pdq", "password": "pdq"}, _user("acme", tenant("acme")), _user("monitor", asking("monitor"))]
    broker = Broker(tmp_path)
    broker.more = f"authorization: {msgspec.json.encode({'users': users}).decode()}\n"
    broker.start()
    bus = await Bus.connect(BusSettings(url=broker.url, user="pdq", password="pdq"), "test")
    await init(bus, LimitSettings(), [MODEL])
    await bus.close()
    yield broker
    broker.stop()


def _user(name: str, imports: Imports) -> dict[str, object]:
    rights = rights_of(imports)
    allowed = {"publish": {"allow": rights.publish}, "subscribe": {"allow": rights.subscribe}}
    return {"user": name, "password": name, "permissions": allowed}


CONTROLS = [
    ("acme", f"pdq.submit.acme.{MODEL}", chat("x")),
    ("monitor", "$JS.API.STREAM.INFO.PDQ_LOG", b""),
]


@pytest.mark.parametrize(("who", "question", "body"), CONTROLS)
async def test_within_one_account_it_does(one_account: Broker, who: str, question: str, body: bytes) -> None:
    victim = await Peer.connect(one_account.url, user="pdq", password="pdq")
    attacker = await Peer.connect(one_account.url, user=who, password=who)
    await victim.listen(">")
    for target in TARGETS:
        await attacker.publish(target, b"direct")
        await attacker.publish(question, body, reply=target)
    await until(lambda: set(TARGETS) <= {message.subject for message in victim.heard})
    # Not one of them could it publish to itself; the broker did, and a stream has kept it as the victim's.
    assert not victim.has(b"direct")
    kept = await victim.client.request("$JS.API.STREAM.MSG.GET.PDQ_LOG", b'{"last_by_subj":"pdq.log.globex.r.state"}')
    assert "message" in msgspec.json.decode(kept.data)
    await attacker.client.close()
    await victim.client.close()


async def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    give_up = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < give_up
        await asyncio.sleep(0.02)
