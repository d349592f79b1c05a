"""What crosses between a hub and its sites, on real brokers over TLS: only what is the site's own, in its own accounts.

Names in capitals are users who may do all within their account (observers), at the hub or at a site: the rights of a
user are one wall, the imports of its account the other. `rogue` is somebody with the key of the site `mill` and a
broker of his own, in which nothing is forbidden.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from nats.aio.msg import Msg
from pdq import subjects
from pdq.accounts import Uplink, render_site
from pdq.accounts.keys import make_seed

from tests.broker import Broker, free_port
from tests.certificates import Authority
from tests.secured import Peer
from tests.site import KeyedHub, Site
from tests.stack import chat

BOUND_S = 10.0
PLANT, MILL = "plant", "mill"


class Rig(NamedTuple):
    authority: Authority
    hub: KeyedHub
    plant: Site
    mill: Site
    rogue: Broker

    async def peer(self, name: str) -> Peer:
        """`acme` is at the hub, `client@plant` at a site, `rogue` at his own broker."""
        who, _, where = name.partition("@")
        if who == "rogue":
            return await Peer.connect(self.rogue.url)
        return await {PLANT: self.plant, MILL: self.mill}[where].peer(who) if where else await self.hub.peer(who)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """No service runs: who hears is an observer."""
    directory = tmp_path_factory.mktemp("hub")
    authority = Authority(directory, "ours")
    tenants = ("TENANT_acme", "TENANT_plant", "TENANT_mill")
    hub = KeyedHub(directory, (PLANT, MILL, "acme", "quarry"), authority=authority, observed=(*tenants, "GATEWAY"))
    plant = Site(hub, PLANT, observed=("UP", "SITE", "CLIENT", "GATEWAY"))
    mill = Site(hub, MILL, observed=("UP", "SITE", "CLIENT"))
    rogue = leaf(directory / "rogue", hub, authority, hub.seed(MILL))
    try:
        asyncio.run(start(hub, plant, mill))
        rogue.start()
        yield Rig(authority, hub, plant, mill, rogue)
    finally:
        for one in (rogue, mill, plant, hub):
            one.stop()


async def start(*stacks: KeyedHub | Site) -> None:
    for stack in stacks:
        await stack.start()


def leaf(directory: Path, hub: KeyedHub, authority: Authority, seed: str, **more: object) -> Broker:
    """A broker that comes to the hub as a leaf, with a configuration of its own."""
    made = broker(directory)
    remote = {"urls": [f"tls://127.0.0.1:{hub.leaf_port}"], "tls": {"ca_file": authority.file}, "nkey": seed, **more}
    remote = {key: value for key, value in remote.items() if value is not None}
    leafnodes = {"reconnect": "0.2s", "remotes": [remote]}
    made.more = f"server_name: {directory.name}\nleafnodes: {msgspec.json.encode(leafnodes).decode()}\n"
    return made


def broker(directory: Path) -> Broker:
    directory.mkdir()
    return Broker(directory)


class Peers:
    """Connections by name, for one test."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.made: dict[str, Peer] = {}

    async def __call__(self, name: str) -> Peer:
        if name not in self.made:
            self.made[name] = await self._rig.peer(name)
        return self.made[name]

    async def close(self) -> None:
        for peer in self.made.values():
            await peer.client.close()


@pytest.fixture
async def peers(rig: Rig) -> AsyncIterator[Peers]:
    peers = Peers(rig)
    yield peers
    await peers.close()


def mark() -> bytes:
    """A payload like no other, which is no request to anybody."""
    return secrets.token_hex(8).encode()


async def until(condition: Callable[[], bool]) -> None:
    give_up = asyncio.get_running_loop().time() + BOUND_S
    while not condition():
        assert asyncio.get_running_loop().time() < give_up
        await asyncio.sleep(0.01)


async def arrived(peers: Peers) -> None:
    """Until all is there that was said before, or listened to: what is said last, between all places, is."""
    hub, last = await peers("PDQ"), mark()
    await hub.listen("pdq.read.*.last")
    for place in (PLANT, MILL):
        here, up = await peers(f"client@{place}"), last + place.encode()
        await here.listen(f"pdq.live.{place}.last.state")
        give_up = asyncio.get_running_loop().time() + BOUND_S
        while not (here.has(last) and hub.has(up)):
            assert asyncio.get_running_loop().time() < give_up
            await here.publish(f"pdq.read.{place}.last", up)
            await hub.publish(f"pdq.live.{place}.last.state", last)
            await asyncio.sleep(0.01)
    for peer in peers.made.values():
        await peer.settle()


# ---- who hears what

PATTERNS = (
    ">",
    "*.*.acme.>",
    "*.*.plant.>",
    "pdq.read.*.*",
    "pdq.cancel.*.*",
    "pdq.live.>",
    "pdq.live.acme.>",
    "pdq.live.plant.>",
    "pdq.live.mill.>",
    "edge.submit.*",
    "hub.submit.*",
    "_INBOX.>",
    "_R_.>",
    "$KV.>",
    "$JS.API.>",
)
HUB_ALL = {"PDQ", "gateway"}
LISTENERS = {
    *(
        "PDQ",
        "TENANT_acme",
        "TENANT_plant",
        "TENANT_mill",
        "GATEWAY",
        "acme",
        "gateway",
        "router",
        "decode",
        "operator",
    ),
    *("UP@plant", "SITE@plant", "CLIENT@plant", "GATEWAY@plant", "client@plant", "gateway@plant", "forwarder@plant"),
    *("UP@mill", "SITE@mill", "CLIENT@mill", "client@mill", "forwarder@mill", "rogue"),
}
OWN_LIVE = {"UP", "CLIENT", "client"}
HEARS: list[tuple[str, str, set[str]]] = [
    # who says it, where, who hears it: these and nobody else
    ("client@plant", "pdq.submit.plant.sim", {"CLIENT@plant", "SITE@plant"}),
    ("client@mill", "pdq.submit.mill.sim", {"CLIENT@mill", "SITE@mill"}),
    ("gateway@plant", "pdq.submit.plant.sim", {"GATEWAY@plant", "SITE@plant"}),
    ("forwarder@plant", "hub.submit.sim", {"SITE@plant", "UP@plant", "TENANT_plant", "PDQ"}),
    ("client@plant", "pdq.read.plant.r", {"CLIENT@plant", "UP@plant", "TENANT_plant", "PDQ", "router"}),
    ("client@plant", "pdq.cancel.plant.r", {"CLIENT@plant", "UP@plant", "TENANT_plant", "PDQ", "router"}),
    ("acme", "pdq.submit.acme.sim", {"TENANT_acme", "PDQ"}),
    ("acme", "pdq.read.acme.r", {"TENANT_acme", "PDQ", "router"}),
    ("PDQ", "pdq.live.acme.r.out", {"PDQ", "TENANT_acme", "acme", "GATEWAY", "gateway", "operator"}),
    (
        "PDQ",
        "pdq.live.plant.r.out",
        {"PDQ", "TENANT_plant", "GATEWAY", "gateway", "operator", "UP@plant", "CLIENT@plant", "GATEWAY@plant"}
        | {"client@plant", "gateway@plant"},
    ),
    (
        "PDQ",
        "pdq.live.mill.r.out",
        {"PDQ", "TENANT_mill", "GATEWAY", "gateway", "operator", "UP@mill", "CLIENT@mill", "client@mill", "rogue"},
    ),
    ("PDQ", "pdq.decode.sim.high.plant.r", {"PDQ"}),
    ("SITE@plant", "$KV.PDQ_TENANTS.tenants.plant", {"SITE@plant"}),
]


async def test_each_hears_what_is_its_own_and_nobody_else_does(peers: Peers) -> None:
    for name in LISTENERS:
        for pattern in PATTERNS:
            await (await peers(name)).listen(pattern)
    await arrived(peers)
    said = [(await peers(who), subject, mark(), hears) for who, subject, hears in HEARS]
    for peer, subject, data, _ in said:
        await peer.publish(subject, data)
    await arrived(peers)
    for _, subject, data, hears in said:
        assert {name for name in LISTENERS if peers.made[name].has(data)} == hears, subject


async def test_an_answer_is_heard_by_who_asked(peers: Peers) -> None:
    """The hub's to a site, and the site's own."""
    hub, answer = await peers("PDQ"), mark()

    async def reply(message: Msg) -> None:
        await message.respond(answer)

    await hub.client.subscribe("pdq.read.plant.answered", cb=reply)
    await hub.settle()
    for name in LISTENERS - {"PDQ"}:
        for pattern in PATTERNS:
            await (await peers(name)).listen(pattern)
    await arrived(peers)
    asker = await peers("client@plant")
    assert (await asker.client.request("pdq.read.plant.answered", b"", timeout=BOUND_S)).data == answer
    kept = (await asker.client.request("pdq.submit.plant.sim", chat("x"), timeout=BOUND_S)).data
    assert msgspec.json.decode(kept)["stream"] == subjects.EDGE
    await arrived(peers)
    # Where it passes, and where it was asked: those who ask there share their account.
    assert {name for name in LISTENERS if peers.made[name].has(answer)} == {"TENANT_plant", "UP@plant", *ASKERS}
    assert {name for name in LISTENERS if peers.made[name].has(kept)} == {"SITE@plant", *ASKERS}


ASKERS = {"CLIENT@plant", "client@plant"}


# ---- who reaches what

AT_HUB = [
    *(f"pdq.{what}.acme.r" for what in ("submit", "read", "cancel", "purge")),
    *(f"pdq.{what}.{PLANT}.r" for what in ("submit", "read", "cancel", "purge")),
    *(f"pdq.{what}.acme.r.{kind}" for what in ("log", "live") for kind in ("state", "out")),
    *(f"pdq.{what}.{PLANT}.r.{kind}" for what in ("log", "live") for kind in ("state", "out")),
    *(f"pdq.{stage}.sim.high.{PLANT}.r" for stage in ("prefill", "decode")),
    f"pdq.dead.decode.sim.{PLANT}.r",
    f"pdq.reap.timer.{PLANT}.r",
    "pdq.ctl.w1.drain",
    "$KV.PDQ_TENANTS.tenants.acme",
    "$KV.PDQ_WORKERS.decode.sim.w1",
    "$JS.API.INFO",
    "$JS.API.STREAM.INFO.PDQ_LOG",
    "$JS.API.STREAM.PURGE.PDQ_LOG",
    "$JS.API.STREAM.MSG.GET.PDQ_LOG",
    "$JS.API.DIRECT.GET.PDQ_LOG",
    f"$JS.API.DIRECT.GET.PDQ_LOG.pdq.log.{PLANT}.r.state",
    "$JS.API.CONSUMER.MSG.NEXT.PDQ_SUBMIT.router",
    "$JS.ACK.PDQ_SUBMIT.router.1.1.1.1.1",
]
"""Subjects in the account of the hub's services."""
API = (
    "STREAM.INFO.PDQ_EDGE",
    "STREAM.PURGE.PDQ_EDGE",
    "STREAM.MSG.GET.PDQ_EDGE",
    "CONSUMER.MSG.NEXT.PDQ_EDGE.forwarder",
)
AT_SITE = [
    f"pdq.submit.{PLANT}.sim",
    "edge.submit.sim",
    "hub.submit.sim",
    *(f"$JS.API.{verb}" for verb in API),
    *(f"$JS.{PLANT}.API.{verb}" for verb in API),
    "$JS.ACK.PDQ_EDGE.forwarder.1.1.1.1.1",
    "$KV.PDQ_TENANTS.tenants.plant",
    "_INBOX.somebody",
]
"""Subjects in the account of the site's JetStream and forwarder."""

OWN = {
    PLANT: {f"pdq.{what}.{PLANT}.r" for what in ("submit", "read", "cancel", "purge")},
    MILL: {f"pdq.{what}.{MILL}.r" for what in ("submit", "read", "cancel", "purge")},
}
SITES_ATTACKERS = ("client", "gateway", "operator", "forwarder", "init", "UP", "SITE", "CLIENT")


@pytest.mark.parametrize("who", [*(f"{who}@{PLANT}" for who in SITES_ATTACKERS), "client@mill", "UP@mill", "rogue"])
async def test_nobody_at_a_site_reaches_what_is_not_its_own_at_the_hub(peers: Peers, who: str) -> None:
    await nobody_is_reached(peers, who, [one for one in AT_HUB if who == "rogue" or one not in own(who)], "PDQ")


@pytest.mark.parametrize(
    "who",
    [
        *("acme", "TENANT_acme", "TENANT_plant", "GATEWAY", "gateway", "operator", "init", "router", "decode", "PDQ"),
        *("client@mill", "forwarder@mill", "UP@mill", "SITE@mill", "rogue"),
    ],
)
async def test_nobody_elsewhere_reaches_a_site(peers: Peers, who: str) -> None:
    await nobody_is_reached(peers, who, AT_SITE, f"SITE@{PLANT}")


@pytest.mark.parametrize("who", ["acme", "TENANT_acme", "GATEWAY", "client@mill", "UP@mill", "rogue", "SITE@plant"])
async def test_nobody_says_what_only_the_services_say_to_a_site(peers: Peers, who: str) -> None:
    said = [f"pdq.live.{PLANT}.r.{kind}" for kind in ("state", "out")]
    await nobody_is_reached(peers, who, said, f"CLIENT@{PLANT}", "PDQ")


def own(who: str) -> set[str]:
    return OWN.get(who.partition("@")[2], set())


async def nobody_is_reached(peers: Peers, who: str, where: list[str], observer: str, other: str = "") -> None:
    """What `who` says does not come to the observer's account; the control: what `other` says (else a second user of
    that account) does."""
    attacker, hears = await peers(who), await peers(observer)
    speaks = await peers(other) if other else await peers._rig.peer(observer)
    await hears.listen(">")
    await arrived(peers)
    stolen, said = {subject: mark() for subject in where}, {subject: mark() for subject in where}
    for subject in where:
        await attacker.publish(subject, stolen[subject])
        await speaks.publish(subject, said[subject])
    await arrived(peers)
    assert [subject for subject in where if hears.has(stolen[subject])] == []
    assert [subject for subject in where if not hears.has(said[subject])] == []
    assert not speaks.refused
    if not other:
        await speaks.client.close()


WITHIN = [
    # what, who at the site may not, who may
    ("edge.submit.sim", ("client", "gateway", "operator", "init", "forwarder", "UP"), "SITE"),
    ("hub.submit.sim", ("client", "gateway", "operator", "init", "UP", "CLIENT"), "forwarder"),
    ("$KV.PDQ_TENANTS.tenants.plant", ("client", "gateway", "init", "forwarder", "UP", "CLIENT"), "operator"),
    ("$JS.API.CONSUMER.MSG.NEXT.PDQ_EDGE.forwarder", ("client", "gateway", "operator", "init", "CLIENT"), "forwarder"),
    ("$JS.ACK.PDQ_EDGE.forwarder.1.1.1.1.1", ("client", "gateway", "operator", "init", "CLIENT"), "forwarder"),
    ("$JS.API.STREAM.UPDATE.PDQ_EDGE", ("client", "gateway", "operator", "forwarder", "CLIENT", "GATEWAY"), "init"),
    ("$JS.API.STREAM.PURGE.PDQ_EDGE", ("client", "gateway", "operator", "init", "forwarder", "GATEWAY"), "SITE"),
    ("$JS.API.STREAM.MSG.GET.PDQ_EDGE", ("client", "gateway", "operator", "init", "forwarder", "GATEWAY"), "SITE"),
    ("$JS.API.DIRECT.GET.PDQ_EDGE", ("client", "gateway", "operator", "init", "forwarder", "GATEWAY"), "SITE"),
    ("$JS.API.STREAM.INFO.PDQ_EDGE", ("client", "gateway", "CLIENT", "GATEWAY"), "operator"),
]


@pytest.mark.parametrize(("subject", "attackers", "owner"), WITHIN)
async def test_nobody_at_a_site_does_the_work_of_another(
    rig: Rig, peers: Peers, subject: str, attackers: tuple[str, ...], owner: str
) -> None:
    hears, speaks, said = await peers("SITE@plant"), await rig.peer(f"{owner}@plant"), mark()
    await hears.listen(subject)
    stolen = {who: mark() for who in attackers}
    for who, data in stolen.items():
        await (await peers(f"{who}@plant")).publish(subject, data)
    await speaks.publish(subject, said)
    await arrived(peers)
    assert [who for who, data in stolen.items() if hears.has(data)] == []
    assert hears.has(said) and not speaks.refused
    await speaks.client.close()


# ---- the confused deputy, across the uplink

ANYWHERE = [*AT_HUB, *AT_SITE]
NOT_INFO = [subject for subject in ANYWHERE if subject != "$JS.API.INFO"]
"""A gateway may ask that by itself."""
DEPUTIES = [
    # who asks, what, where the answer must not be written
    ("client@plant", f"pdq.submit.{PLANT}.sim", ANYWHERE),
    ("client@plant", f"pdq.read.{PLANT}.deputy", ANYWHERE),
    ("GATEWAY@plant", f"pdq.submit.{PLANT}.sim", NOT_INFO),
    ("UP@plant", f"pdq.submit.{PLANT}.sim", ANYWHERE),
    ("UP@plant", f"pdq.read.{PLANT}.deputy", ANYWHERE),
    ("TENANT_plant", f"pdq.submit.{PLANT}.sim", ANYWHERE),
    ("acme", "pdq.submit.acme.sim", ANYWHERE),
    ("GATEWAY", f"pdq.submit.{PLANT}.sim", NOT_INFO),
    ("rogue", f"pdq.submit.{MILL}.sim", ANYWHERE),
    ("rogue", f"pdq.read.{MILL}.deputy", ANYWHERE),
]


@pytest.mark.parametrize(("who", "question", "targets"), DEPUTIES)
async def test_an_answer_goes_to_nobody_else(peers: Peers, who: str, question: str, targets: list[str]) -> None:
    hub, site, attacker = await peers("PDQ"), await peers(f"SITE@{PLANT}"), await peers(who)

    async def reply(message: Msg) -> None:
        await message.respond(b"the answer")

    await hub.client.subscribe("pdq.read.*.deputy", cb=reply)
    for peer in (hub, site):
        await peer.listen(">")
    await arrived(peers)
    for target in targets:
        await attacker.publish(question, b"a question", reply=target)
    await arrived(peers)
    asked = [message for peer in (hub, site) for message in peer.heard if message.data == b"a question"]
    answers = [message for peer in (hub, site) for message in peer.heard if message.reply == "" and is_answer(message)]
    assert asked and answers, "the question was heard, and answered"
    assert [message.subject for message in answers if message.subject in targets] == []


def is_answer(message: Msg) -> bool:
    """Of a stream, or of the endpoint above."""
    return message.data == b"the answer" or b'"seq":' in message.data or b'"error":' in message.data


async def test_within_one_account_it_does(peers: Peers) -> None:
    """The control: where an account is shared, the broker writes what its user could not."""
    hub, attacker = await peers("PDQ"), await peers("router")
    await hub.listen("pdq.log.acme.r.out")
    await attacker.publish("pdq.log.acme.r.out", b"direct")
    await attacker.publish(f"$JS.API.STREAM.INFO.{subjects.LOG}", reply="pdq.log.acme.r.out")
    await until(lambda: bool(hub.heard))
    assert not hub.has(b"direct")


# ---- who is let in


async def test_who_is_not_a_site_gets_no_uplink(rig: Rig, tmp_path: Path) -> None:
    theirs = Authority(tmp_path, "theirs").file
    wrong: dict[str, dict[str, object]] = {
        "no-key": {"nkey": None},
        "a-key-of-nobody": {"nkey": make_seed()},
        "a-key-of-a-role": {"nkey": rig.hub.seed("decode")},
        "another-authority": {"tls": {"ca_file": theirs}},
        "no-TLS": {"tls": None, "urls": [f"nats://127.0.0.1:{rig.hub.leaf_port}"]},
    }
    tried = {
        kind: leaf(tmp_path / kind, rig.hub, rig.authority, rig.hub.seed("quarry"), **more)
        for kind, more in wrong.items()
    }
    right = leaf(tmp_path / "right", rig.hub, rig.authority, rig.hub.seed("quarry"))
    try:
        for one in (*tried.values(), right):
            one.start()
        assert await reaches(right, "quarry", await rig.hub.peer("PDQ"), BOUND_S), "the control"
        waits = [reaches(one, "quarry", await rig.hub.peer("PDQ"), 1.0) for one in tried.values()]
        assert dict(zip(tried, await asyncio.gather(*waits), strict=True)) == dict.fromkeys(tried, False)
    finally:
        for one in (*tried.values(), right):
            one.stop()


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_nothing_is_told_to_a_hub_without_tls(tmp_path: Path, scheme: str) -> None:
    """To one that takes everybody. With `nats://` it is: the control."""
    impostor, site, port = broker(tmp_path / "impostor"), broker(tmp_path / "site"), free_port()
    impostor.more = f'leafnodes {{ listen: "127.0.0.1:{port}" }}\n'
    uplink = Uplink(f"{scheme}://127.0.0.1:{port}", make_seed())
    site.more = render_site(PLANT, uplink, {}, anybody=True) + "server_name: $PDQ_SITE\n"
    try:
        for one in (impostor, site):
            one.start()
        there = await Peer.connect(impostor.url)
        assert await reaches(site, PLANT, there, 1.5 if scheme == "tls" else BOUND_S) == (scheme == "nats")
    finally:
        for one in (impostor, site):
            one.stop()


async def reaches(leaf: Broker, site: str, there: Peer, within_s: float) -> bool:
    """Whether a question from a leaf's client is heard within a time; `there` is closed."""
    here, question, data = await Peer.connect(leaf.url), subjects.read(site, "reaches"), mark()
    await there.listen(question)
    give_up = asyncio.get_running_loop().time() + within_s
    while not there.has(data) and asyncio.get_running_loop().time() < give_up:
        await here.publish(question, data)
        await asyncio.sleep(0.05)
    await there.client.close()
    await here.client.close()
    return there.has(data)


async def test_a_site_whose_key_is_removed_is_cut_off(rig: Rig, peers: Peers, tmp_path: Path) -> None:
    """By a restart of the hub: a reload refuses new leaves, but leaves in peace one that is there."""
    quarry = leaf(tmp_path / "quarry", rig.hub, rig.authority, rig.hub.seed("quarry"))
    quarry.start()
    try:
        assert await reaches(quarry, "quarry", await rig.hub.peer("PDQ"), BOUND_S)
        rig.hub.seed_file("quarry").unlink()
        rig.hub.write()
        await rig.hub.reload()
        rig.hub.broker.stop()
        rig.hub.broker.start()
        await rig.plant.linked()
        await rig.mill.linked()
        assert not await reaches(quarry, "quarry", await rig.hub.peer("PDQ"), 1.0)
        await arrived(peers)
    finally:
        quarry.stop()


async def test_a_site_is_added_while_others_work(rig: Rig, peers: Peers, tmp_path: Path) -> None:
    await arrived(peers)
    rig.hub.write("fresh")
    fresh = leaf(tmp_path / "fresh", rig.hub, rig.authority, rig.hub.seed("fresh"))
    fresh.start()
    try:
        assert not await reaches(fresh, "fresh", await rig.hub.peer("PDQ"), 1.0)
        await rig.hub.reload()
        assert await reaches(fresh, "fresh", await rig.hub.peer("PDQ"), BOUND_S)
        await arrived(peers)
    finally:
        fresh.stop()


async def test_a_leaf_goes_where_it_is_sent_only(rig: Rig, peers: Peers) -> None:
    """The hub tells it no other address: behind a proxy that is cut, it is cut off."""
    there, here = await peers("PDQ"), await peers(f"client@{PLANT}")
    await there.listen("pdq.read.plant.around")
    rig.plant.uplink.cut()
    try:
        for _ in range(50):
            await here.publish("pdq.read.plant.around", b"cut")
            await asyncio.sleep(0.05)
        kept = await here.client.request(f"pdq.submit.{PLANT}.sim", chat("x"), timeout=BOUND_S)
        assert msgspec.json.decode(kept.data)["stream"] == subjects.EDGE, "it waits at the site meanwhile"
    finally:
        rig.plant.uplink.heal()
    await rig.plant.linked()
    await here.publish("pdq.read.plant.around", b"healed")
    await arrived(peers)
    assert there.has(b"healed") and not there.has(b"cut")
