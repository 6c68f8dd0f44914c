"""A small process that outlives the engine by a moment and takes it out of the registries.

vLLM kills an engine that is to end at once with SIGKILL, together with all its children, unless
``--shutdown-timeout`` gives it time; and an engine may crash. So this process is nobody's child,
and learns of the engine's end by the end of a pipe. It does nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from kvbaton_vllm.errors import RegistryError
from kvbaton_vllm.registry import Registry
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Deadline, Endpoint

_GOODBYE = 4.0


class LastWill:
    """The engine's end of the pipe.

    Raises:
        OSError: if the process cannot be started.
    """

    def __init__(self, urls: Sequence[str], engine_id: str, credentials: Credentials) -> None:
        will = {
            "urls": list(urls),
            "engine_id": engine_id,
            "credentials": dataclasses.asdict(credentials),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbaton_vllm.last_will"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # Small enough for the pipe, so this does not wait for the other side.
        self._write(json.dumps(will).encode() + b"\n")

    def revoke(self) -> None:
        """Makes the process end without doing anything."""
        self._write(b"revoked\n")
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        # What was started has forked and ended long ago.
        self._process.poll()

    def _write(self, data: bytes) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(data)
                self._process.stdin.flush()


def main() -> int:
    """Waits for the engine's end."""
    if os.fork() > 0:
        # Whoever kills the engine's descendants does not find the other half.
        os._exit(0)
    os.chdir("/")
    will = json.loads(sys.stdin.buffer.readline())
    if sys.stdin.buffer.read():
        return 0
    credentials = Credentials(**will["credentials"])
    for url in will["urls"]:
        with contextlib.suppress(RegistryError, ValueError):
            Registry(Endpoint(url, credentials)).deregister(will["engine_id"], Deadline(_GOODBYE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
