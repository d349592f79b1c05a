"""The forwarder of a site: what its clients submitted goes on to the hub."""
