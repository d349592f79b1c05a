"""vLLM general plugin: runs in each of vLLM's processes before anything is loaded.

vLLM's CPU backend scans the attributes of every loaded module (`_rebind_kernels`). llvmlite's lazy library
object answers each name it is asked for, dunder names too, with an object of its own, and the scan dies on it
when model and scheduler share a process. Names that Python itself asks for must raise instead.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make llvmlite's library object raise AttributeError for dunder names. Idempotent; a no-op without llvmlite."""
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    wrapper = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None or getattr(wrapper.__getattr__, "refuses_dunder", False):
        return
    wrapper.__getattr__ = _refusing_dunder(wrapper.__getattr__)


def _refusing_dunder(lookup: Any) -> Any:
    def __getattr__(self: Any, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    __getattr__.refuses_dunder = True  # type: ignore[attr-defined]
    return __getattr__
