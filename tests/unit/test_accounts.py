"""Rights of roles, the broker's configuration made of them, and the directory of keys."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pdq import cli, subjects
from pdq.accounts import ASKING, ROLES, WORKING, Keyring, public_key, render
from pdq.accounts.keys import make_seed
from pdq.accounts.roles import asking, tenant, working
from pdq.bus import identity
from pdq.errors import Misconfigured, Rejected
from pdq.settings import BusSettings

from tests.broker import server_binary

EXAMPLE = Path("infra/nats/accounts.example.conf")
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
KEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def accounts_of(text: str) -> dict[str, Any]:
    """The block as data."""
    plain = "".join(line for line in text.splitlines(True) if not line.lstrip().startswith("#"))
    found: dict[str, Any] = json.loads(plain.partition("accounts: ")[2])
    return found


# ---- rights


@pytest.mark.parametrize("role", WORKING)
def test_no_service_may_change_streams_or_make_consumers(role: str) -> None:
    forbidden = re.compile(
        r"\$JS\.API\.(STREAM\.(CREATE|UPDATE|DELETE|RESTORE)|CONSUMER\.(CREATE|DURABLE|DELETE))|.*API\.>"
    )
    assert not [subject for subject in working(role).publish if forbidden.match(subject)]  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_a_wildcard_for_everything(role: str) -> None:
    rights = working(role) if role in WORKING else asking(role)  # type: ignore[arg-type]
    all_subjects = [subject for part in rights for subject in part]
    assert not {">", "pdq.>", "$JS.>", "$JS.API.>", "$KV.>", "_INBOX.>", "*.>"} & set(all_subjects)


def test_a_worker_may_do_what_both_stages_may() -> None:
    both = working("prefill"), working("decode")
    assert set(working("worker").publish) == set(both[0].publish) | set(both[1].publish)


def test_all_that_a_tenant_may_use_is_its_own() -> None:
    for part in tenant("acme"):
        assert all(subject.split(".")[2] == "acme" for subject in part)


@pytest.mark.parametrize("role", ASKING)
def test_who_asks_jetstream_from_outside_imports_its_info(role: str) -> None:
    """Or the broker answers as well, that the account has no JetStream."""
    imports = asking(role)  # type: ignore[arg-type]
    if any(subject.startswith("$JS.API") for subject in (*imports.calls, *imports.ranges)):
        assert "$JS.API.INFO" in imports.calls


# ---- the configuration


def test_each_account_may_import_just_what_it_imports() -> None:
    accounts = accounts_of(render({role: (f"U{role}",) for role in ROLES}, {"acme": ("UA",), "globex": ("UG",)}))
    granted = {
        (kind, one[kind], name)
        for one in accounts["PDQ"]["exports"]
        for kind in ("service", "stream")
        if kind in one
        for name in one["accounts"]
    }
    taken = {
        (kind, what["subject"], name)
        for name, account in accounts.items()
        for one in account.get("imports", ())
        for kind, what in one.items()
    }
    assert granted == taken
    assert len(accounts["PDQ"]["exports"]) == len(
        {json.dumps(one, sort_keys=True) for one in accounts["PDQ"]["exports"]}
    )
    assert {name for name, account in accounts.items() if "jetstream" in account} == {"PDQ"}


def test_a_role_without_a_key_is_left_out() -> None:
    accounts = accounts_of(render({"router": ("UR",)}, {}))
    assert list(accounts) == ["PDQ"] and [user["nkey"] for user in accounts["PDQ"]["users"]] == ["UR"]


def test_the_example_is_what_pdq_makes() -> None:
    text = EXAMPLE.read_text()
    keys: dict[str, tuple[str, ...]] = {name: (key,) for name, key in re.findall(r'# (\S+)\n +"nkey": "(\w+)"', text)}
    assert text == render({name: keys[name] for name in ROLES}, {"acme": keys["acme"]})


@pytest.mark.parametrize("name", ["acme", "a-b_C", "1", "PDQ", "router", "x" * 64])
def test_the_server_takes_it(tmp_path: Path, name: str) -> None:
    Keyring(tmp_path).write([name])
    (tmp_path / "nats.conf").write_text('jetstream: enabled\ninclude "accounts.conf"\n')
    command = [server_binary(), "-t", "-c", str(tmp_path / "nats.conf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


# ---- keys


def test_a_seed_has_the_public_key_that_other_tools_tell() -> None:
    assert public_key(SEED) == public_key(f" {SEED}\n") == KEY
    assert re.fullmatch("SU[A-Z2-7]{56}", make_seed()) and make_seed() != make_seed()


@pytest.mark.parametrize(
    "seed",
    ["", "x", SEED[:-1], SEED[:-1] + "A", SEED.lower(), "é" * 58, KEY, SEED.replace("SU", "SA", 1), "S" * 1_000],
)
def test_what_is_no_seed_is_refused_and_not_shown(seed: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        public_key(seed)
    assert len(seed) < 10 or seed not in str(refused.value)


def test_keys_are_made_once_and_for_their_owner_only(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    first = ring.write(["acme"])
    assert len(first.made) == len(ROLES) + 1 and first.changed and first.tenants == ("acme",)
    assert {file.stat().st_mode & 0o777 for file in first.made} == {0o600}
    assert {file.parent.stat().st_mode & 0o777 for file in first.made} == {0o700}
    seeds = [file.read_text().strip() for file in first.made]
    text = ring.config.read_text()
    assert len(set(seeds)) == len(seeds) and not [seed for seed in seeds if seed in text]
    again = ring.write(["acme"])
    assert again.made == () and not again.changed and ring.config.read_text() == text
    more = ring.write(["globex"])
    assert [file.name for file in more.made] == ["globex.nk"] and more.tenants == ("acme", "globex")


def test_a_second_key_of_a_name_is_a_second_user(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.write(["acme"])
    file = ring.seed_file("tenants", "acme")
    file.rename(file.with_name("acme.old.nk"))
    ring.write(["acme"])
    users = accounts_of(ring.config.read_text())["TENANT_acme"]["users"]
    assert len({user["nkey"] for user in users}) == 2
    inboxes = [user["permissions"]["subscribe"]["allow"][0] for user in users]
    assert inboxes == [f"{subjects.inbox(user['nkey'])}.>" for user in users]


def test_a_tenant_whose_key_is_removed_has_no_account(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.write(["acme", "globex"])
    ring.seed_file("tenants", "acme").unlink()
    assert ring.write().changed
    text = ring.config.read_text()
    assert "acme" not in text and "TENANT_globex" in accounts_of(text)


def test_a_tenant_may_be_called_as_a_role(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.write(["router"])
    assert ring.seed_file("tenants", "router") != ring.seed_file("roles", "router")
    assert len(accounts_of(ring.config.read_text())["TENANT_router"]["users"]) == 1


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "x" * 65, "../x", "é"])
def test_a_bad_name_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(Rejected):
        Keyring(tmp_path).write(["acme", name])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name"), [("roles", "root.nk"), ("tenants", "a b.nk")])
def test_a_file_of_nobody_is_named(tmp_path: Path, kind: str, name: str) -> None:
    Keyring(tmp_path).write(["acme"])
    (tmp_path / kind / name).write_text(SEED)
    with pytest.raises(Rejected, match=name.removesuffix(".nk")):
        Keyring(tmp_path).write()


def test_a_file_that_holds_no_seed_is_named(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.write(["acme"])
    ring.seed_file("tenants", "acme").write_bytes(b"\xff\xfe")
    before = ring.config.read_text()
    with pytest.raises(Misconfigured, match=r"acme\.nk"):
        ring.write()
    assert ring.config.read_text() == before


# ---- the command


def test_the_command_tells_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["nats", "accounts", "--out", str(tmp_path / "keys"), "--tenant", "acme", "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tenants"] == ["acme"] and told["changed"] and len(told["made"]) == len(ROLES) + 1
    assert "SU" not in re.sub(r"/\S+", "", json.dumps(told))
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["made"] == []


def test_the_command_refuses_a_bad_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["nats", "accounts", "--out", str(tmp_path), "--tenant", "a.b"]) == 2
    assert "a.b" in capsys.readouterr().err


# ---- what a connection is told


def test_an_nkey_has_its_own_inbox(tmp_path: Path) -> None:
    file = tmp_path / "router.nk"
    file.write_text(SEED + "\n")
    for settings in (BusSettings(nkey_seed=SEED), BusSettings(nkey_file=str(file))):
        assert identity.options(settings) == {"nkeys_seed_str": SEED, "inbox_prefix": f"_INBOX_{KEY[:13]}".encode()}
    assert identity.options(BusSettings(nkey_seed=SEED, inbox_prefix="_MINE"))["inbox_prefix"] == b"_MINE"
    assert identity.options(BusSettings()) == {}


def test_a_key_file_that_is_not_there_is_named() -> None:
    with pytest.raises(Misconfigured, match=r"PDQ_NATS_NKEY_FILE .*/no/such\.nk"):
        identity.options(BusSettings(nkey_file="/no/such.nk"))


def test_a_later_refusal_is_waited_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = PermissionError("nats: 'Authorization Violation'")
    first = identity.Refusals(2)
    assert [first.final(refused, before=False) for _ in range(2)] == ["", "refuses these credentials"]
    later = identity.Refusals(1)
    assert not later.final(refused, before=True)
    monkeypatch.setattr(identity, "PATIENCE_S", 0.0)
    assert later.final(refused, before=True)
    assert not later.final(ConnectionError("reset by peer"), before=True)
