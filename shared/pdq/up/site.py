"""The site of `pdq up --edge`: a broker that is a leaf of the hub and takes requests whether or not the hub is there.

Its forwarder and its gateway are services like the others (`pdq.up.plan`). At the hub it is a tenant of that name, and
the leaf is the only one there who needs a key: a new one for every start, as nobody else has to know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pdq import subjects
from pdq.accounts import Uplink, public_key, render, render_listener, render_site
from pdq.accounts.keys import make_seed
from pdq.init import init_edge
from pdq.settings import BusSettings, GatewaySettings, LimitSettings, variable
from pdq.up import broker
from pdq.up.layout import Layout
from pdq.up.machine import HOST, free_port
from pdq.up.process import Spec

NAME = "edge"
BROKER, FORWARDER, GATEWAY = "site-nats", "forwarder", "site-gateway"
PROCESSES = (BROKER, FORWARDER, GATEWAY)
PATIENCE_S = 600.0
"""How long the site's gateway waits for the hub: as long as OpenAI's clients wait for an answer."""


class Site:
    """Made once, when the stack starts: ports are asked for right before they are used."""

    def __init__(self, layout: Layout, environ: Mapping[str, str], limits: LimitSettings) -> None:
        """environ: of the processes, without what is not meant for them."""
        self.nats_url = ""
        self._layout = layout
        self._environ = environ
        self._limits = limits
        self._leaf_port = free_port()
        self._seed = make_seed()

    def of_hub(self) -> str:
        """What the hub's configuration has besides: the site's account, and where its leaf comes in."""
        key = public_key(self._seed)
        accounts = render({}, {NAME: (key,)}, anybody=True)
        return accounts + render_listener(f"{HOST}:{self._leaf_port}", only=(NAME, key))

    def nats(self) -> Spec:
        """The site's broker. Raises Misconfigured when it is not installed."""
        port = free_port()
        self.nats_url = broker.url(port)
        streams = subjects.edge_streams(self._limits.of_streams(), first_seq=0)
        text = broker.config(port, self._layout.site_store, streams, domain=NAME) + "server_name: $PDQ_SITE\n"
        uplink = Uplink(f"nats://{HOST}:{self._leaf_port}", self._seed)
        broker.write(self._layout.site_config, render_site(NAME, uplink, {}, anybody=True) + text)
        return broker.spec(BROKER, port, self._layout.site_config, self._environ)

    async def init(self) -> None:
        """Streams and consumers. Raises Misconfigured or Unavailable."""
        await broker.made(self.nats_url, partial(init_edge, limits=self._limits))

    def environment(self) -> dict[str, str]:
        """What the services of the site are told, and nobody else."""
        patience = variable(GatewaySettings, "accept_s")
        return {
            variable(BusSettings, "url"): self.nats_url,
            "PDQ_TENANT": NAME,
            patience: self._environ.get(patience, f"{PATIENCE_S:g}"),
        }
