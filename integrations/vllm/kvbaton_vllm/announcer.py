"""Keeps one engine registered at one registry, from a thread of its own.

Must never hold the engine up: nothing here raises into it or waits for a registry, but for the
bounded goodbye.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import random
import threading
from collections.abc import Mapping

from kvbaton_vllm.errors import Denied, RegistryError, Unknown
from kvbaton_vllm.registry import Echo, EngineDescription, Rank, Receipt, Registry
from kvbaton_vllm.wire import Deadline

_EXCHANGE = 4.0
_GOODBYE = 2.0
_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 15.0


def pause_after(failures: int, jitter: float) -> float:
    """Seconds until the next attempt after so many failures in a row; ``jitter`` from 0 to 1."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + jitter / 2.0)


class State(enum.Enum):
    """What an engine is to others."""

    READY = "ready"
    DRAINING = "draining"
    LEFT = "left"


class Announcer:
    """Registers, gives signs of life, registers again when the registry forgot, and leaves."""

    def __init__(
        self,
        registry: Registry,
        engine: EngineDescription,
        ranks: Mapping[Rank, bytes],
        ttl: float,
        log: logging.Logger,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._ranks = dict(ranks)
        self._ttl = ttl
        self._log = log
        # Not an event: only this may be used in a signal handler.
        self._orders: queue.SimpleQueue[State] = queue.SimpleQueue()
        self._state = State.READY
        self._registered = False
        self._echo: Echo | None = None
        self._complaint: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvbaton-announcer", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def ask_to_drain(self) -> None:
        """Makes it tell that the engine takes no more requests; safe in a signal handler."""
        self._orders.put(State.DRAINING)

    def ask_to_leave(self) -> None:
        """Makes it leave; returns at once, and is safe in a signal handler."""
        self._orders.put(State.LEFT)

    def join(self) -> None:
        """Waits until it has left; never longer than one exchange and the goodbye."""
        self._thread.join(_EXCHANGE + _GOODBYE)

    def _run(self) -> None:
        failures = 0
        pause = 0.0
        while self._wait(pause) is not State.LEFT:
            try:
                pause = self._step()
                failures = 0
                self._complaint = None
            except RegistryError as error:
                failures += 1
                self._complain(error)
                pause = pause_after(failures, random.random())
            except Exception:
                failures += 1
                self._log.exception("kvbaton: the engine could not be announced")
                pause = _LONGEST_PAUSE
        if self._registered:
            self._say_goodbye()

    def _wait(self, pause: float) -> State:
        """Waits for an order; the state that the engine is in then."""
        with contextlib.suppress(queue.Empty):
            self._state = self._orders.get(timeout=max(pause, 0.0))
        return self._state

    def _step(self) -> float:
        """One exchange; how long to wait after it."""
        deadline = Deadline(_EXCHANGE)
        engine_id = self._engine.engine_id
        if self._registered:
            try:
                receipt = self._registry.heartbeat(
                    engine_id, self._state.value, self._echo, deadline
                )
            except Unknown:
                self._log.warning(
                    "kvbaton: %s no longer knows engine %s; registering again",
                    self._registry.url,
                    engine_id,
                )
                self._registered = False
            else:
                self._echo = receipt.echo
                return self._interval(receipt)
        receipt = self._registry.register(
            self._engine, self._state.value, self._ranks, self._ttl, deadline
        )
        self._registered = True
        self._echo = receipt.echo
        self._log.info(
            "kvbaton: engine %s is registered at %s with %d rank(s)",
            engine_id,
            self._registry.url,
            len(self._ranks),
        )
        # At once: only with the first echo does the registry know this engine's clock.
        return 0.0

    def _interval(self, receipt: Receipt) -> float:
        return (self._ttl if receipt.ttl is None else min(self._ttl, receipt.ttl)) / 3.0

    def _complain(self, error: RegistryError) -> None:
        text = str(error)
        if text == self._complaint:
            return
        self._complaint = text
        what = "gave no sign of life" if self._registered else "is not registered"
        advice = "check KVBATON_TOKEN or token_file; " if isinstance(error, Denied) else ""
        self._log.error(
            "kvbaton: engine %s %s: %s; %strying on, the engine serves meanwhile",
            self._engine.engine_id,
            what,
            text,
            advice,
        )

    def _say_goodbye(self) -> None:
        try:
            self._registry.deregister(self._engine.engine_id, Deadline(_GOODBYE))
        except RegistryError as error:
            self._log.warning("kvbaton: the registry could not be told goodbye: %s", error)
