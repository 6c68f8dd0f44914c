"""Hears of the end early: vLLM gives an engine a few seconds from SIGTERM to SIGKILL, and tells the
connector only when the workers are gone, which may be too late to say goodbye."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def on_termination(tell: Callable[[], None]) -> bool:
    """Calls ``tell`` as SIGTERM comes, before whoever handles it now; whether that could be done.

    ``tell`` must be safe in a signal handler: no lock that the interrupted code may hold.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGTERM)
    if not callable(handler):
        # Nobody ends this process in order, so it ends at once; that is not ours to change.
        return False

    def both(number: int, frame: FrameType | None) -> None:
        tell()
        handler(number, frame)

    signal.signal(signal.SIGTERM, both)
    return True
