"""What nobody may do on the broker besides his own work: each row is tried, and somebody else does it with success.

Names in capitals are users who may do all within their account (observers, in tests/secured.py): the rights of a user
are one wall, the imports of its account the other.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from pdq import subjects
from pdq.accounts import public_key

from tests.secured import Peer, SecuredStack

JOB = "sim.high.globex.r"
SERVICES = ("router", "prefill", "decode", "worker")
OUTSIDE = ("gateway", "operator", "init", "monitor")
UNBOUND = ("TENANT_acme", "GATEWAY", "OPERATOR", "INIT", "MONITOR")
ALL_BUT_PDQ = ("acme", *OUTSIDE, *UNBOUND)

PUBLISH: list[tuple[tuple[str, ...], str, str]] = [
    # who may not, what, who may
    (("acme", "TENANT_acme", *SERVICES, "init", "INIT", "monitor", "MONITOR"), "pdq.submit.globex.sim", "globex"),
    (("acme", "TENANT_acme", *SERVICES, "init", "INIT", "monitor", "MONITOR"), "pdq.read.globex.r", "globex"),
    (("acme", "TENANT_acme", *SERVICES, "init", "INIT", "monitor", "MONITOR"), "pdq.cancel.globex.r", "globex"),
    (("acme", "TENANT_acme", *SERVICES, "init", "INIT", "monitor", "MONITOR"), "pdq.purge.globex.r", "globex"),
    (ALL_BUT_PDQ, "pdq.log.globex.r.state", "decode"),
    ((*ALL_BUT_PDQ, "router", "prefill"), "pdq.log.globex.r.out", "decode"),
    ((*ALL_BUT_PDQ, *SERVICES), "pdq.live.globex.r.state", "PDQ"),
    ((*ALL_BUT_PDQ, "prefill"), f"pdq.prefill.{JOB}", "router"),
    ((*ALL_BUT_PDQ, "decode"), f"pdq.decode.{JOB}", "prefill"),
    ((*ALL_BUT_PDQ, "prefill"), "pdq.dead.decode.sim.globex.r", "decode"),
    ((*ALL_BUT_PDQ, "prefill", "decode", "worker"), "pdq.reap.timer.globex.r", "router"),
    ((*ALL_BUT_PDQ, *SERVICES), "pdq.reap.due.globex.r", "PDQ"),
    (
        ("acme", "TENANT_acme", *SERVICES, "gateway", "GATEWAY", "init", "INIT", "monitor", "MONITOR"),
        "pdq.ctl.w1.drain",
        "operator",
    ),
    ((*ALL_BUT_PDQ, "router", "prefill"), "$KV.PDQ_WORKERS.decode.sim.w1", "decode"),
    ((*ALL_BUT_PDQ, "prefill", "decode", "worker"), "$KV.PDQ_WORKERS.router.r1", "router"),
    (
        ("acme", "TENANT_acme", *SERVICES, "gateway", "GATEWAY", "monitor", "MONITOR", "init", "INIT"),
        "$KV.PDQ_TENANTS.tenants.acme",
        "operator",
    ),
    ((*ALL_BUT_PDQ, "prefill", "decode", "worker"), "$JS.ACK.PDQ_SUBMIT.router.1.1.1.1.1", "router"),
    ((*ALL_BUT_PDQ, "router", "prefill"), "$JS.ACK.PDQ_DECODE.sim-high.1.1.1.1.1", "decode"),
    ((*ALL_BUT_PDQ, "prefill", "decode", "worker"), "$JS.API.CONSUMER.MSG.NEXT.PDQ_SUBMIT.router", "router"),
    ((*ALL_BUT_PDQ, "router", "prefill"), "$JS.API.CONSUMER.MSG.NEXT.PDQ_DECODE.sim-high", "decode"),
    (ALL_BUT_PDQ, "$JS.API.STREAM.PURGE.PDQ_LOG", "router"),
    ((*ALL_BUT_PDQ, *SERVICES), "$JS.API.STREAM.PURGE.PDQ_SUBMIT", "PDQ"),
    ((*ALL_BUT_PDQ, *SERVICES), "$JS.API.STREAM.DELETE.PDQ_SCRATCH", "PDQ"),
    ((*ALL_BUT_PDQ, *SERVICES), "$JS.API.CONSUMER.DELETE.PDQ_DECODE.sim-scratch", "PDQ"),
    (("acme", *SERVICES, "gateway", "operator", "monitor", "OPERATOR"), "$JS.API.STREAM.UPDATE.PDQ_LOG", "init"),
    (("acme", *SERVICES, "gateway", "operator", "monitor", "OPERATOR"), "$JS.API.STREAM.CREATE.PDQ_X", "init"),
    ((*ALL_BUT_PDQ, *SERVICES), "$JS.API.CONSUMER.CREATE.PDQ_LOG.mine.pdq.log.globex.r.state", "PDQ"),
    (ALL_BUT_PDQ, "$JS.API.STREAM.MSG.GET.PDQ_LOG", "router"),
    (ALL_BUT_PDQ, "$JS.API.DIRECT.GET.PDQ_LOG", "router"),
    ((*ALL_BUT_PDQ, *SERVICES), "$JS.API.DIRECT.GET.PDQ_LOG.pdq.log.globex.r.state", "PDQ"),
    (("acme", "gateway", "init", "monitor", "MONITOR"), "$JS.API.DIRECT.GET.PDQ_DEAD", "operator"),
    (("acme", "gateway", "init", "monitor", "MONITOR"), "$JS.API.STREAM.MSG.DELETE.PDQ_DEAD", "operator"),
    (("acme", "prefill", "decode", "worker", "init", "monitor"), "$JS.API.DIRECT.GET.KV_PDQ_TENANTS", "gateway"),
]
"""What is sent to JetStream's API is no request that it can read, so that it does nothing to the streams."""

LISTEN: list[tuple[tuple[str, ...], str, str]] = [
    (("acme", "TENANT_acme", "monitor", "MONITOR", "init", "INIT"), "pdq.live.globex.>", "globex"),
    (("acme", "TENANT_acme", *SERVICES, "monitor", "MONITOR", "init", "INIT"), "pdq.live.>", "PDQ"),
    (("acme", "TENANT_acme", *SERVICES, "monitor", "MONITOR", "init", "INIT"), "pdq.live.*.>", "gateway"),
    (("acme", "TENANT_acme", *SERVICES, "monitor", "MONITOR"), "pdq.live.*.*.out", "operator"),
    (("acme", "TENANT_acme", "monitor", "MONITOR"), "pdq.live.*.*.state", "router"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, "INIT", "MONITOR"), ">", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, "INIT", "MONITOR"), "*.*.globex.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "_INBOX.>", "globex"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "_R_.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "pdq.log.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "pdq.submit.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *UNBOUND, "prefill", "decode", "worker"), "pdq.read.*.*", "router"),
    (("acme", "TENANT_acme", *OUTSIDE, *UNBOUND, "prefill", "decode", "worker"), "pdq.cancel.*.*", "router"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "pdq.decode.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *UNBOUND, "router"), "pdq.ctl.*.drain", "decode"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "$KV.>", "PDQ"),
    (("acme", "TENANT_acme", *OUTSIDE, *SERVICES, *UNBOUND), "$JS.API.>", "PDQ"),
]
"""Who may not, the pattern, who may."""


def rows(table: list[tuple[tuple[str, ...], str, str]]) -> list[tuple[str, str, str]]:
    return [(who, subject, other) for several, subject, other in table for who in several]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    """A broker with everybody's streams, and no service that would answer."""
    observed = ("PDQ", "TENANT_globex", *UNBOUND)
    stack = SecuredStack(tmp_path_factory.mktemp("denied"), ("acme", "globex"), observed=observed)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


class Peers:
    """Connections by user, for one test."""

    def __init__(self, stack: SecuredStack) -> None:
        self._stack = stack
        self._made: list[Peer] = []

    async def __call__(self, name: str) -> Peer:
        self._made.append(await self._stack.peer(name))
        return self._made[-1]

    async def close(self) -> None:
        for peer in self._made:
            await peer.client.close()


@pytest.fixture
async def peers(stack: SecuredStack) -> AsyncIterator[Peers]:
    peers = Peers(stack)
    yield peers
    await peers.close()


def mark() -> bytes:
    """A payload like no other, which is no request to anybody."""
    return secrets.token_hex(8).encode()


@pytest.mark.parametrize(("who", "subject", "other"), rows(PUBLISH))
async def test_nobody_publishes_what_is_not_his(peers: Peers, who: str, subject: str, other: str) -> None:
    observer, attacker, owner = await peers("PDQ"), await peers(who), await peers(other)
    await observer.listen(subject)
    stolen, own = mark(), mark()
    await attacker.publish(subject, stolen)
    await owner.publish(subject, own)
    await observer.settle()
    assert not observer.has(stolen)
    assert observer.has(own) and not owner.refused
    if who not in UNBOUND:
        assert any("permissions violation" in refusal and subject.lower() in refusal for refusal in attacker.refused)


@pytest.mark.parametrize(("who", "pattern", "other"), rows(LISTEN))
async def test_nobody_hears_what_is_not_his(peers: Peers, who: str, pattern: str, other: str) -> None:
    attacker, owner = await peers(who), await peers(other)
    await attacker.listen(pattern)
    await owner.listen(pattern)
    assert not owner.refused
    await traffic(await peers("PDQ"), await peers("globex"))
    await heard_something(owner)
    await attacker.settle()
    assert not attacker.heard


@pytest.mark.parametrize("who", ["router", "prefill", "worker", *OUTSIDE, *UNBOUND, "acme"])
async def test_nobody_hears_the_answers_to_a_service(stack: SecuredStack, peers: Peers, who: str) -> None:
    pattern = f"{subjects.inbox(public_key(stack.seed('decode')))}.>"
    attacker, owner = await peers(who), await peers("decode")
    await attacker.listen(pattern)
    await owner.listen(pattern)
    await owner.publish("$JS.API.CONSUMER.INFO.PDQ_DECODE.sim-high", reply=pattern.replace(">", "mine"))
    await heard_something(owner)
    await attacker.settle()
    assert len(owner.heard) == 1 and not attacker.heard


async def heard_something(peer: Peer) -> None:
    async with asyncio.timeout(10):
        while not peer.heard:
            await asyncio.sleep(0.01)


async def traffic(services: Peer, tenant: Peer) -> None:
    """Something on every subject that the table has, of the services and of a tenant."""
    for kind in ("state", "out"):
        await services.publish(f"pdq.log.globex.r.{kind}", mark())
    for subject in (
        f"pdq.decode.sim.high.globex.{mark().decode()}",
        "pdq.ctl.w1.drain",
        "$KV.PDQ_WORKERS.decode.sim.w1",
    ):
        await services.publish(subject, mark())
    await services.client.request("$JS.API.STREAM.INFO.PDQ_LOG", b"", timeout=5)
    await tenant.client.request("pdq.submit.globex.sim", mark(), timeout=5)
    for subject in ("pdq.read.globex.r", "pdq.cancel.globex.r"):
        await tenant.publish(subject, mark(), reply="_INBOX.somewhere")
