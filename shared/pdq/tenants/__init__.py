"""Tenants: who may ask, by API key, and how much.

`Store` changes the bucket PDQ_TENANTS (`pdq tenant`), `Directory` follows it, `Access` tells whose a request is.
"""

from pdq.tenants.access import Access
from pdq.tenants.directory import Directory
from pdq.tenants.records import KeyRecord, Limits, TenantRecord
from pdq.tenants.store import Added, Known, Store

__all__ = ["Access", "Added", "Directory", "KeyRecord", "Known", "Limits", "Store", "TenantRecord"]
