"""Which vLLM this package knows, and whether the one at hand is built as expected.

The classes that are overridden are private to vLLM and differ from version to version.
"""

from __future__ import annotations

import inspect
import re

KNOWN = ("0.32.0",)
"""Tried with real engines; see the README."""

_SCHEDULER = {
    "set_xfer_handshake_metadata": ("self", "metadata"),
    "shutdown": ("self",),
}
_VALUES = (
    "_TRANSFER_MODE",
    "_is_hma_required",
    "engine_id",
    "side_channel_host",
    "side_channel_port",
    "transfer_tp_size",
    "use_host_buffer",
)
_WORKER = {
    "_nixl_handshake": (
        "self",
        "host",
        "port",
        "remote_tp_size",
        "expected_engine_id",
        "remote_dcp_size",
        "remote_pp_size",
        "notif_agents_only",
    ),
    "_track_remote_engine_replacement": ("self", "engine_id", "host", "port"),
}


def is_known(version: str) -> bool:
    """Whether this package was tried with that vLLM; how it was built for a device is no matter."""
    release = re.match(r"v?(\d+(?:\.\d+)*)(?=$|\+)", version)
    return release is not None and release.group(1) in KNOWN


def missing_parts(half: object, *, scheduler: bool) -> list[str]:
    """What of one half of vLLM's connector is not as the overrides need it; best nothing."""
    kind = type(half)
    needed = _SCHEDULER if scheduler else _WORKER
    missing = []
    for name, parameters in needed.items():
        found = getattr(kind, name, None)
        if not inspect.isfunction(found):
            missing.append(f"{kind.__name__}.{name} is missing")
        elif tuple(inspect.signature(found).parameters) != parameters:
            missing.append(f"{kind.__name__}.{name} takes other parameters")
        elif name == "_nixl_handshake" and "zmq_ctx" not in found.__code__.co_names:
            missing.append(f"{kind.__name__}.{name} does not open its socket with `zmq_ctx`")
    if scheduler:
        values = [name for name in _VALUES if not hasattr(half, name)]
        missing += [f"{kind.__name__}.{name} is missing" for name in values]
    return missing


def advice(version: str) -> str:
    """One sentence for people who run a vLLM that is not known."""
    return (
        f"kvbaton-vllm knows vLLM {', '.join(KNOWN)}, but this is {version}: the connector's "
        "private parts may differ"
    )
