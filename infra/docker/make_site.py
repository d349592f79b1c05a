"""What the two brokers of the profile `edge` know of each other, as files that their configurations include.

`make_site.py NAME HUB SITE`: hub.conf into the directory HUB, site.conf and the site's key into SITE. A key that is
there stays. Nobody else needs one: both brokers take whoever reaches their ports for a user of theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdq.accounts import Uplink, public_key, render, render_listener, render_site
from pdq.accounts.keys import make_seed

HUB_LISTENS = "0.0.0.0:7422"
HUB = "nats://nats:7422"


def seed(file: Path) -> str:
    """The one that is there, or a new one."""
    if not file.exists():
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text(f"{make_seed()}\n", "ascii")
        fresh.replace(file)
    return file.read_text("ascii").strip()


def main(name: str, hub: str, site: str) -> None:
    own = seed(Path(site, "uplink.nk"))
    key = public_key(own)
    accounts = render({}, {name: (key,)}, anybody=True)
    Path(hub, "hub.conf").write_text(accounts + render_listener(HUB_LISTENS, only=(name, key)), "utf-8")
    Path(site, "site.conf").write_text(render_site(name, Uplink(HUB, own), {}, anybody=True), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
