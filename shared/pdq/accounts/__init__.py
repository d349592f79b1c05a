"""Who may do what on the broker: roles, tenants, their keys, and the nats-server configuration made of them.

Services that work on requests share the account PDQ, each with the rights of its role. Everybody who only asks (a
tenant, the gateway, an operator) has an account of its own, which imports just the subjects it may use: over an import
the broker replaces the reply subject, so that nobody can make it write its answer where he may not write himself.
"""

from pdq.accounts.carried import Carried, write_site
from pdq.accounts.config import render
from pdq.accounts.keyring import Keyring
from pdq.accounts.keys import public_key
from pdq.accounts.roles import ASKING, ROLES, SITE_ROLES, WORKING, Asking, Role, SiteRole, Working
from pdq.accounts.site import Uplink, render_listener, render_site

__all__ = [
    "ASKING",
    "ROLES",
    "SITE_ROLES",
    "WORKING",
    "Asking",
    "Carried",
    "Keyring",
    "Role",
    "SiteRole",
    "Uplink",
    "Working",
    "public_key",
    "render",
    "render_listener",
    "render_site",
    "write_site",
]
