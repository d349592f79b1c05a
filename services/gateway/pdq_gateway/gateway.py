"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio

import msgspec
from pdq.bus import Bus
from pdq.settings import GatewaySettings, LimitSettings, Models
from pdq.telemetry import Telemetry
from pdq.tenants import Access

from pdq_gateway.tenancy import Refused


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    bus: Bus
    telemetry: Telemetry
    settings: GatewaySettings
    limits: LimitSettings
    models: Models
    access: Access
    """Whose a request is."""
    refused: Refused
    over: asyncio.Event
    """Set when the time to drain is over: answers that are not complete break off."""
