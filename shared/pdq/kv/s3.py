"""What LMCache's S3 adapter lacks for an S3 pool.

It names the bucket in the host (`bucket.host`), which needs a name server that answers for every bucket; a store of
one's own seldom has one. It takes credentials from its configuration, which it shows to who asks, or through boto3.
And it gives a store up for good after three failures to connect. Here the bucket is the first part of the path, the
credentials are handed over in memory, and a store that comes back is used again.
"""

from __future__ import annotations

import sys
from urllib.parse import quote

from pdq.errors import Misconfigured
from pdq.kv.pool import Pool


def adapt(store: Pool) -> None:
    """Make this process's S3 adapter use `store`. Raises Misconfigured when the AWS runtime is not installed."""
    try:
        from awscrt import auth
    except ImportError as exc:
        raise Misconfigured("an S3 pool needs the package awscrt, which the engine sets have") from exc
    from lmcache.v1.distributed.l2_adapters import s3_l2_adapter

    user, password, token = store.credentials
    provider = auth.AwsCredentialsProvider.new_static(user, password, token or None)
    s3_l2_adapter._make_credentials_provider = lambda config: provider
    s3_l2_adapter.S3L2Adapter.max_connection_failures = sys.maxsize
    s3_l2_adapter._format_safe_path = lambda name: f"/{store.bucket}/{quote(name)}"
