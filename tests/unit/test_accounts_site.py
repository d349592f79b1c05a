"""A site's rights, its broker's configuration, and the directory that is carried to it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pdq import cli, subjects
from pdq.accounts import (
    SITE_ROLES,
    Keyring,
    Uplink,
    public_key,
    render,
    render_listener,
    render_site,
    write_site,
)
from pdq.accounts.config import rights_of
from pdq.accounts.keys import make_seed
from pdq.accounts.roles import SITE_ASKING, forwarder, site_asking
from pdq.errors import Misconfigured, Rejected

from tests.broker import server_binary
from tests.certificates import Authority

EDGE = Path("infra/nats/edge")
HUB = "tls://hub.example.com:7422"
UPLINK = Uplink(HUB, "$PDQ_UPLINK_SEED")
KEYS = {role: (f"U{role}",) for role in SITE_ROLES}


def accounts_of(text: str) -> dict[str, Any]:
    """The block as data."""
    plain = "".join(line for line in text.splitlines(True) if not line.lstrip().startswith("#"))
    found: dict[str, Any] = json.JSONDecoder().raw_decode(plain.partition("accounts: ")[2])[0]
    return found


def checked(config: Path) -> None:
    """By the server itself."""
    done = subprocess.run([server_binary(), "-t", "-c", str(config)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


# ---- rights


@pytest.mark.parametrize("role", SITE_ROLES)
def test_all_that_a_role_may_use_is_the_sites_own(role: str) -> None:
    rights = forwarder() if role == "forwarder" else rights_of(site_asking(role, "plant"))  # type: ignore[arg-type]
    own = re.compile(
        r"pdq\.(submit|read|cancel|purge|live)\.plant\.[*>]|hub\.submit\.\*|_INBOX\.>|\$KV\.PDQ_TENANTS\.>"
        r"|\$JS\.(API\.INFO|API\.(STREAM|CONSUMER|DIRECT)\.[A-Z.]+\.(KV_)?(PDQ_|\*).*|ACK\.PDQ_EDGE\..*)"
    )
    assert [subject for part in rights for subject in part if not own.fullmatch(subject)] == []


@pytest.mark.parametrize("role", ["client", "gateway", "operator", "forwarder"])
def test_nobody_but_init_may_change_streams_or_make_consumers(role: str) -> None:
    rights = forwarder() if role == "forwarder" else rights_of(site_asking(role, "plant"))  # type: ignore[arg-type]
    forbidden = re.compile(
        r"\$JS\.API\.(STREAM\.(CREATE|UPDATE|DELETE|PURGE|RESTORE)|CONSUMER\.(CREATE|DURABLE|DEL)).*"
    )
    assert not [subject for subject in rights.publish if forbidden.match(subject)]


# ---- the site's configuration


def test_each_account_of_a_site_may_import_just_what_it_imports() -> None:
    accounts = accounts_of(render_site("plant", UPLINK, KEYS))
    kinds = ("service", "stream")
    granted = {
        (kind, source, one[kind], name)
        for source, account in accounts.items()
        for one in account.get("exports", ())
        for kind in kinds
        if kind in one
        for name in one["accounts"]
    }
    taken = {
        (kind, one[kind]["account"], one[kind]["subject"], name)
        for name, account in accounts.items()
        for one in account.get("imports", ())
        for kind in kinds
        if kind in one
    }
    assert granted == taken
    assert {name for name, account in accounts.items() if "jetstream" in account} == {"SITE"}
    assert "users" not in accounts["UP"]


@pytest.mark.parametrize("anybody", [False, True])
def test_what_crosses_the_uplink_is_the_tenants(anybody: bool) -> None:
    """A site may ask of the hub what its tenant may, and no more."""
    hub = accounts_of(render({}, {"plant": ("UP",)}))["TENANT_plant"]["imports"]
    site = accounts_of(render_site("plant", UPLINK, KEYS, anybody=anybody))["UP"]["exports"]
    at_hub = {(kind, what["subject"]) for one in hub for kind, what in one.items()}
    at_site = {(kind, one[kind]) for one in site for kind in ("service", "stream") if kind in one}
    assert at_hub == at_site


def test_a_submit_waits_at_the_site_whoever_asks() -> None:
    accounts = accounts_of(render_site("plant", UPLINK, KEYS))
    for name in ("CLIENT", "GATEWAY", "OPERATOR"):
        (submit,) = [one for one in accounts[name]["imports"] if one.get("to") == subjects.submit("plant", "*")]
        assert submit["service"] == {"account": "SITE", "subject": subjects.edge_submit("*")}
    open_site = accounts_of(render_site("plant", UPLINK, {}, anybody=True))
    assert open_site["SITE"]["mappings"] == {"pdq.submit.plant.*": "edge.submit.{{wildcard(1)}}"}
    assert set(open_site) == {"UP", "SITE"}


def test_only_the_forwarder_may_submit_at_the_hub() -> None:
    accounts = accounts_of(render_site("plant", UPLINK, KEYS))
    may = {
        name
        for name, account in accounts.items()
        for user in account.get("users", ())
        if subjects.hub_submit("*") in user["permissions"]["publish"]["allow"]
    }
    to_hub = {
        name
        for name, account in accounts.items()
        for one in account.get("imports", ())
        if one.get("service", {}) == {"account": "UP", "subject": subjects.submit("plant", "*")}
    }
    assert may == to_hub == {"SITE"}


@pytest.mark.parametrize("name", ["plant", "a-b_C", "1", "1e5", "true", "UP", "client", "x" * 64])
@pytest.mark.parametrize("anybody", [False, True])
def test_the_server_takes_a_site_of_any_name(tmp_path: Path, name: str, anybody: bool) -> None:
    uplink = Uplink(f"{HUB},tls://two:7422", make_seed(), Authority(tmp_path, "ca").file)
    keys = {role: (public_key(make_seed()),) for role in SITE_ROLES}
    (tmp_path / "site.conf").write_text(render_site(name, uplink, keys, anybody=anybody))
    (tmp_path / "leaf.conf").write_text(
        'include "site.conf"\nserver_name: $PDQ_SITE\njetstream { domain: $PDQ_SITE, store_dir: "js" }\n'
    )
    checked(tmp_path / "leaf.conf")


@pytest.mark.parametrize("anybody", [False, True])
def test_the_server_takes_a_hub(tmp_path: Path, anybody: bool) -> None:
    key = public_key(make_seed())
    pair = Authority(tmp_path, "ca").sign("hub")
    listener = render_listener("127.0.0.1:7422", only=("plant", key) if anybody else None, tls=pair)
    assert '"no_advertise": true' in listener
    (tmp_path / "hub.conf").write_text(render({}, {"plant": (key,)}, anybody=anybody) + listener)
    checked(tmp_path / "hub.conf")


@pytest.mark.parametrize(
    ("url", "tls_ca", "tls"),
    [
        ("tls://hub:7422", "", {}),
        ("nats://hub:7422,wss://hub:443", "", {}),
        ("nats://hub:7422", "/ca.pem", {"ca_file": "/ca.pem"}),
        ("nats://hub:7422", "", None),
    ],
)
def test_an_uplink_that_should_have_tls_insists(url: str, tls_ca: str, tls: dict[str, str] | None) -> None:
    text = render_site("plant", Uplink(url, "SU", tls_ca), {})
    (remote,) = json.loads(text.partition("leafnodes: ")[2])["remotes"]
    assert remote.get("tls") == tls and remote["urls"] == url.split(",") and remote["account"] == "UP"


# ---- the examples


def placed(tmp_path: Path, name: str, site: str) -> Path:
    """An example as it is set up, on this machine: its secrets beside it, and certificates that are there."""
    pair = Authority(tmp_path, "ca").sign("server")
    ring = Keyring(tmp_path / "keys")
    done = write_site(ring, site, HUB)
    for directory in (tmp_path, tmp_path / "edge"):
        secrets = directory / "secrets"
        secrets.mkdir(parents=True)
        (secrets / "variables.conf").write_text('JETSTREAM_KEY: "of no importance"\n')
        for file in (ring.config, done.directory / "site.conf", done.directory / "uplink.conf"):
            (secrets / file.name).write_text(file.read_text())
    for file in (*EDGE.glob("*.conf"), *EDGE.parent.glob("*.conf")):
        text = file.read_text().replace("/etc/nats/secrets/server.crt", pair.cert)
        text = text.replace("/etc/nats/secrets/server.key", pair.key).replace('"/data"', f'"{tmp_path}/data"')
        (tmp_path / file.relative_to(EDGE.parent)).write_text(text)
    return tmp_path / "edge" / name


@pytest.mark.parametrize("name", ["hub.conf", "leaf.conf"])
def test_the_server_takes_the_examples(tmp_path: Path, name: str) -> None:
    checked(placed(tmp_path, name, "plant-7"))


def test_the_leaf_may_have_tls_for_its_clients(tmp_path: Path) -> None:
    config = placed(tmp_path, "leaf.conf", "plant-7")
    text = config.read_text()
    block = text[text.index("# tls {") :]
    config.write_text(text.replace(block, block.replace("# ", "")))
    assert "\ntls {" in config.read_text()
    checked(config)


def test_the_example_of_a_site_is_what_pdq_makes(tmp_path: Path) -> None:
    text = (EDGE / "site.example.conf").read_text()
    keys: dict[str, str] = dict(re.findall(r'# (\S+)\n +"nkey": "(\w+)"', text))
    made = write_site(Keyring(tmp_path), "plant-7", HUB, "/etc/nats/secrets/hub-ca.pem").directory / "site.conf"
    own = re.sub(
        r'# (\S+)(\n +"nkey": )"\w+"', lambda found: f'# {found[1]}{found[2]}"{keys[found[1]]}"', made.read_text()
    )
    inbox = re.compile(r"_INBOX_\w{13}")
    assert inbox.sub("_INBOX_", own) == inbox.sub("_INBOX_", text)


# ---- what is carried


def test_what_is_carried_is_made_once_and_its_secrets_are_for_their_owner(tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys")
    first = write_site(ring, "plant", HUB)
    assert first.hub_changed and first.site_changed
    assert {f"{role}.nk" for role in SITE_ROLES} <= {file.name for file in first.made}
    secret = [*(first.directory / "roles").glob("*"), first.directory / "uplink.conf"]
    assert {file.stat().st_mode & 0o777 for file in secret} == {0o600} and len(secret) == len(SITE_ROLES) + 1
    seed = ring.seed_file("tenants", "plant").read_text().strip()
    assert f'"{seed}"' in (first.directory / "uplink.conf").read_text()
    texts = [ring.config.read_text(), (first.directory / "site.conf").read_text()]
    seeds = [seed, *(file.read_text().strip() for file in (first.directory / "roles").glob("*.nk"))]
    assert not [text for text in texts for seed in seeds if seed in text]
    again = write_site(ring, "plant", HUB)
    assert again.made == () and not again.hub_changed and not again.site_changed
    assert ring.write().tenants == ("plant",), "it stays one of the hub's tenants"


def test_a_new_key_for_the_uplink_is_carried(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    directory = write_site(ring, "plant", HUB).directory
    before = (directory / "uplink.conf").read_text()
    file = ring.seed_file("tenants", "plant")
    file.rename(file.with_name("plant.old.nk"))
    done = write_site(ring, "plant", HUB)
    assert done.hub_changed and done.site_changed and (directory / "uplink.conf").read_text() != before
    assert len(accounts_of(ring.config.read_text())["TENANT_plant"]["users"]) == 2


@pytest.mark.parametrize("name", ["", "a.b", "*", "../x", "x" * 65])
def test_a_bad_name_of_a_site_makes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(Rejected):
        write_site(Keyring(tmp_path), name, HUB)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "hub",
    [
        "",
        "hub",
        "hub:7422",
        "http://hub:7422",
        "tls://hub",
        "tls://u:p@hub:7422",
        f"{HUB},x",
        "tls://hub:99999",
        'tls://h"}:1',
    ],
)
def test_a_bad_address_of_the_hub_makes_nothing(tmp_path: Path, hub: str) -> None:
    with pytest.raises(Rejected, match="no address of a hub"):
        write_site(Keyring(tmp_path), "plant", hub)
    assert not list(tmp_path.iterdir())


def test_files_of_a_site_that_are_none_are_named(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    directory = write_site(ring, "plant", HUB).directory
    (directory / "roles" / "client.nk").write_text("SU")
    with pytest.raises(Misconfigured, match=r"client\.nk"):
        write_site(ring, "plant", HUB)
    (directory / "roles" / "client.nk").rename(directory / "roles" / "root.nk")
    with pytest.raises(Rejected, match="root"):
        write_site(ring, "plant", HUB)


# ---- the command


def test_the_command_tells_what_it_made_and_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["nats", "site", "plant", "--out", str(tmp_path / "keys"), "--hub", HUB, "--json"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["site"] == "plant" and told["hub_changed"] and told["site_changed"]
    assert "SU" not in re.sub(r"/\S+", "", json.dumps(told))
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["made"] == []
    assert cli.main(["nats", "site", "plant", "--out", str(tmp_path), "--hub", "x"]) == 2
    assert "no address of a hub" in capsys.readouterr().err


@pytest.mark.parametrize("role", SITE_ASKING)
def test_who_asks_jetstream_at_a_site_imports_its_info(role: str) -> None:
    imports = site_asking(role, "plant")  # type: ignore[arg-type]
    if any(subject.startswith("$JS.API") for subject in (*imports.calls, *imports.ranges)):
        assert "$JS.API.INFO" in imports.calls
