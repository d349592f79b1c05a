"""The broker, behind one narrow door: this package is the only importer of `nats`."""

from pdq.bus.connection import BrokerErrors
from pdq.bus.core import Bus, connected
from pdq.bus.delivery import Delivery
from pdq.bus.outbox import Channel, Outbox
from pdq.bus.pull import Puller
from pdq.bus.wire import Ack, Stored

__all__ = ["Ack", "BrokerErrors", "Bus", "Channel", "Delivery", "Outbox", "Puller", "Stored", "connected"]
