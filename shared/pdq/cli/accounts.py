"""`pdq nats accounts`: keys and accounts for the broker."""

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
