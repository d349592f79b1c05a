"""The broker, behind one narrow door: this package is the only importer of `nats`."""

from pdq.bus.core import Bus, Stored, broker_errors, connected
from pdq.bus.delivery import Delivery
from pdq.bus.outbox import Channel, Outbox
from pdq.bus.pull import Puller

__all__ = ["Bus", "Channel", "Delivery", "Outbox", "Puller", "Stored", "broker_errors", "connected"]
