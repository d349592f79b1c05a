"""The engine's core ends with its front: alone it would hold the model's memory for ever, and serve nobody.

vLLM ends its core when the front shuts down in order, not when the front is killed. The connection to the front's
socket closes either way, at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

ORDERLY_S = 10.0
"""How long the core may take to unregister and end by itself."""


def follow(path: str) -> None:
    """End this process once the one that listens on the Unix socket at `path` is gone, or has closed it.

    And only then: Ctrl-C reaches every process of a terminal, and is meant for the front, which drains first.
    Called in the main thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(path,), name="pdq-lifeline", daemon=True).start()


def _follow(path: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as front:
            front.connect(path)
            while front.recv(1):
                pass
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORDERLY_S)
    os._exit(1)
