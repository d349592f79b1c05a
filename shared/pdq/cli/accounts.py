"""`pdq nats`: keys and accounts for the broker, and for the brokers of sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdq.cli import output
from pdq.cli.options import AsJson
from pdq.cli.running import reported

nats_commands = typer.Typer(no_args_is_help=True, help="The broker's own configuration.")

Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where keys and accounts.conf are.", show_default=False)
]
Tenants = Annotated[
    list[str], typer.Option("--tenant", metavar="NAME", help="A tenant to add; may be repeated.", show_default=False)
]

Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name, and its tenant's.", show_default=False)]
HubUrl = Annotated[
    str,
    typer.Option(
        "--hub", metavar="URL", help="Where the hub listens for leaves, as the site sees it.", show_default=False
    ),
]
Ca = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="At the site, the authority (PEM) of the hub's certificate. Without: those the system trusts.",
        show_default=False,
    ),
]


@nats_commands.callback()
def _nats() -> None:
    """The broker's own configuration."""


@nats_commands.command()
def accounts(out: Out, tenant: Tenants = [], as_json: AsJson = False) -> None:  # noqa: B006
    """Make a key for every role and tenant that has none, and accounts.conf for nats-server to include.

    It may be repeated: keys that are there stay. A key is DIR/roles/ROLE.nk or DIR/tenants/NAME.nk, readable by its
    owner; give each service and each client its own as PDQ_NATS_NKEY_FILE. A tenant whose file is removed is cut off
    once accounts.conf is written and read again (a new one needs two reloads). docs/security.md has the whole set-up.

    \b
    Examples:
      pdq nats accounts --out /etc/nats/pdq --tenant acme --tenant globex
      nats-server --signal reload && nats-server --signal reload
    """
    with reported(as_json):
        from pdq.accounts import Keyring

        done = Keyring(out).write(tenant)
        if as_json:
            plain = {"config": str(done.config), "roles": done.roles, "tenants": done.tenants}
            output.json(plain | {"made": [str(file) for file in done.made], "changed": done.changed})
            return
        rows: list[tuple[object, ...]] = [(file, "made") for file in done.made]
        rows.append((done.config, "written: reload nats-server, twice" if done.changed else "unchanged"))
        output.line(output.table(rows))


@nats_commands.command()
def site(name: Name, out: Out, hub: HubUrl, tls_ca: Ca = "", as_json: AsJson = False) -> None:
    """Make a site known to the hub, and write what its own broker and services need.

    The hub knows the site as a tenant, by the key DIR/tenants/NAME.nk, once it has read accounts.conf again.
    DIR/sites/NAME is for the site: site.conf for its nats-server to include, and a key for each role there. Carry it
    there by a way that keeps secrets. It may be repeated: keys that are there stay. docs/edge.md has the whole set-up.

    \b
    Examples:
      pdq nats site plant-7 --out /etc/nats/pdq --hub tls://hub.example.com:7422
      nats-server --signal reload && nats-server --signal reload
    """
    with reported(as_json):
        from pdq.accounts import Keyring, write_site

        done = write_site(Keyring(out), name, hub, tls_ca)
        if as_json:
            plain = {"site": name, "directory": str(done.directory), "made": [str(file) for file in done.made]}
            output.json(plain | {"hub_changed": done.hub_changed, "site_changed": done.site_changed})
            return
        rows: list[tuple[object, ...]] = [(file, "made") for file in done.made]
        rows.append((out / "accounts.conf", "written: reload the hub, twice" if done.hub_changed else "unchanged"))
        rows.append((done.directory, "written: carry it to the site" if done.site_changed else "unchanged"))
        output.line(output.table(rows))
