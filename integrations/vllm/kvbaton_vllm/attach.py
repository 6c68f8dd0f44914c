"""Puts the registry in the place of the side channel, in a scheduler's and in a worker's half.

Works on the objects that vLLM made, by a few of their methods that ``version`` names; imports no
vLLM. Everything else of the connector stays vLLM's own.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

from kvbaton_vllm.announcer import Announcer
from kvbaton_vllm.errors import NobodyKnows
from kvbaton_vllm.handshake import Lookup, RegistrySocket
from kvbaton_vllm.last_will import LastWill
from kvbaton_vllm.registry import EngineDescription, Place, Rank, Registry
from kvbaton_vllm.settings import HandOffAddress, LastWillPolicy, Settings, SideChannel
from kvbaton_vllm.termination import on_termination
from kvbaton_vllm.wire import Endpoint

Question = tuple[bytes, int, int]


class SchedulerHalf:
    """Announces the engine when its payloads are known, instead of serving them over ZMQ."""

    def __init__(
        self,
        scheduler: Any,
        settings: Settings,
        engine: EngineDescription,
        encode: Callable[[Any], bytes],
        log: logging.Logger,
        drains: bool = False,
    ) -> None:
        self._settings = settings
        self._registries = registries(settings)
        self._engine = engine
        self._drains = drains
        self._encode = encode
        self._log = log
        self._announcers: list[Announcer] = []
        self._last_will: LastWill | None = None
        self._hears_of_the_end = False
        self._serve_side_channel = scheduler.set_xfer_handshake_metadata
        self._shut_down = scheduler.shutdown
        scheduler.set_xfer_handshake_metadata = self.publish
        scheduler.shutdown = self.shut_down

    def publish(self, metadata: Mapping[Rank, Any]) -> None:
        """Takes the payloads of all ranks; returns at once, whatever the registries do."""
        self._leave()
        ranks = {rank: self._encode(payload) for rank, payload in metadata.items()}
        self._announcers = [
            Announcer(registry, self._engine, ranks, self._settings.ttl, self._log)
            for registry in self._registries
        ]
        for announcer in self._announcers:
            announcer.start()
        self._make_last_will()
        if not self._hears_of_the_end:
            self._hears_of_the_end = on_termination(self._terminated)
        if self._settings.side_channel is SideChannel.ON:
            self._serve_side_channel(metadata)

    def shut_down(self) -> None:
        """Leaves the registries, then does what vLLM does; bounded."""
        for announcer in self._announcers:
            announcer.ask_to_leave()
        self._shut_down()
        self._leave()

    def _make_last_will(self) -> None:
        if self._settings.last_will is LastWillPolicy.OFF or not self._registries:
            return
        urls = [registry.url for registry in self._registries]
        try:
            credentials = self._settings.credentials
            self._last_will = LastWill(urls, self._engine.engine_id, credentials)
        except OSError as error:
            self._log.warning(
                "kvbaton: %s; killed, the engine would stay registered for %g s",
                error,
                self._settings.ttl,
            )

    def _terminated(self) -> None:
        # In a signal handler.
        for announcer in self._announcers:
            if self._drains:
                announcer.ask_to_drain()
            else:
                announcer.ask_to_leave()

    def _leave(self) -> None:
        for announcer in self._announcers:
            announcer.ask_to_leave()
        for announcer in self._announcers:
            announcer.join()
        self._announcers = []
        if self._last_will is not None:
            self._last_will.revoke()
            self._last_will = None


class WorkerHalf:
    """Shakes hands with peers through the registry, by vLLM's own code but for its socket."""

    def __init__(
        self,
        worker: Any,
        settings: Settings,
        decode: Callable[[bytes], Question],
        log: logging.Logger,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._registries = registries(settings)
        self._decode = decode
        self._log = log
        self._places: dict[str, Place | None] = {}
        self._over_side_channel = type(worker)._nixl_handshake
        self._track = worker._track_remote_engine_replacement
        worker._nixl_handshake = self.handshake
        worker._track_remote_engine_replacement = self.track

    def handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *more: Any,
        **named: Any,
    ) -> Any:
        """What vLLM's own method does, with the payloads from a registry.

        Raises:
            NobodyKnows: if no registry has them in time, and the side channel is off.
        """
        lookup = Lookup(
            [*self._registries, *self._named(host, port)],
            expected_engine_id,
            self._settings.budget,
            patient=not self._may_use_side_channel(),
        )
        socket = RegistrySocket(lookup, self._decode)
        over_registry = with_socket(self._over_side_channel, lambda *_ignored: socket)
        arguments = (self._worker, host, port, remote_tp_size, expected_engine_id, *more)
        try:
            result = over_registry(*arguments, **named)
        except NobodyKnows as error:
            if lookup.found or not self._may_use_side_channel():
                raise
            self._log.warning("kvbaton: %s; asking %s:%s over ZMQ", error, host, port)
            return self._over_side_channel(*arguments, **named)
        self._places[expected_engine_id] = lookup.place
        return result

    def track(self, engine_id: str, host: str, port: int) -> None:
        """Tells vLLM by which address a peer replaces its earlier life.

        That is its HTTP address where the registry knows it: many peers may share the address in
        their hand-offs, namely the registry's.
        """
        if engine_id in self._places:
            place = self._places.pop(engine_id)
            if place is not None:
                host, port = place.base_url, place.dp_rank
            elif self._settings.hand_off is not HandOffAddress.SIDE_CHANNEL:
                host, port = engine_id, 0
        self._track(engine_id, host, port)

    def _may_use_side_channel(self) -> bool:
        return (
            self._settings.side_channel is SideChannel.ON
            and self._settings.hand_off is HandOffAddress.SIDE_CHANNEL
        )

    def _named(self, host: str, port: int) -> list[Registry]:
        if self._settings.hand_off is HandOffAddress.SIDE_CHANNEL:
            return []
        shown = f"[{host}]" if ":" in host else host
        url = f"{self._settings.hand_off.value}://{shown}:{port}"
        if url in self._settings.registries:
            return []
        return [Registry(Endpoint(url, self._settings.credentials))]


def registries(settings: Settings) -> list[Registry]:
    """The registries that the settings name.

    Raises:
        ValueError: if a certificate or key cannot be used.
    """
    return [Registry(Endpoint(url, settings.credentials)) for url in settings.registries]


def with_socket(function: Any, open_socket: Callable[..., RegistrySocket]) -> Any:
    """The same code, but ``zmq_ctx`` opens another socket for it; nobody else notices."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, "zmq_ctx": open_socket},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
