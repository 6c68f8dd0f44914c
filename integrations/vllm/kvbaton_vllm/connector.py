"""The module that ``kv_connector_module_path`` names; the only one that imports vLLM.

Decides whether this vLLM is known, and leaves everything else to ``attach``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.version import __version__ as vllm_version

from kvbaton_vllm import version
from kvbaton_vllm.attach import Question, SchedulerHalf, WorkerHalf
from kvbaton_vllm.describe import describe
from kvbaton_vllm.settings import Settings, UnknownVersion, unknown_version

# Below `vllm`, since vLLM gives handlers to its own loggers only.
_log = logging.getLogger("vllm.kvbaton")

_Plain: Any = KVConnectorFactory.get_connector_class_by_name("NixlConnector")


class UnsupportedVersion(RuntimeError):
    """This vLLM is not known, and the settings say that this is to be refused."""


# vLLM looks for this very name in many places.
class NixlConnector(_Plain):  # type: ignore[misc]
    """vLLM's NixlConnector, which shakes hands over HTTP."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        policy = unknown_version(extra, os.environ)
        problems = [] if version.is_known(vllm_version) else [version.advice(vllm_version)]
        if problems and policy is UnknownVersion.REFUSE:
            raise UnsupportedVersion(problems[0])
        plain = bool(problems) and policy is UnknownVersion.PLAIN
        # Wrong settings are told before vLLM's connector takes ports and memory.
        settings = None if plain else Settings.read(extra, os.environ)
        super().__init__(vllm_config, role, kv_cache_config)
        self._kvbaton: SchedulerHalf | WorkerHalf | None = None
        if settings is not None:
            half = self.connector_scheduler or self.connector_worker
            missing = version.missing_parts(half, scheduler=half is self.connector_scheduler)
            if missing and policy is not UnknownVersion.PLAIN:
                raise UnsupportedVersion("; ".join([*problems, *missing]))
            problems += missing
            plain = bool(missing)
        if plain or settings is None:
            _log.warning(
                "kvbaton: %s. This engine runs as plain NixlConnector: it registers nowhere, and "
                'handshakes go over ZMQ. Set kvbaton.unknown_version to "refuse" or "try" to '
                "change that.",
                "; ".join(problems),
            )
        elif self.connector_scheduler is not None:
            self._kvbaton = self._attach_scheduler(vllm_config, settings)
        else:
            decoder = msgspec.msgpack.Decoder(Question)
            self._kvbaton = WorkerHalf(self.connector_worker, settings, decoder.decode, _log)

    def _attach_scheduler(self, vllm_config: Any, settings: Settings) -> SchedulerHalf:
        scheduler = self.connector_scheduler
        engine = describe(vllm_config, scheduler, settings.base_url, vllm_version)
        if settings.base_url is None and settings.registries:
            _log.warning(
                "kvbaton: without `base_url` (or KVBATON_BASE_URL) the engine can be looked up, "
                "but the router does not send it requests by itself"
            )
        encoder = msgspec.msgpack.Encoder()
        drains = getattr(vllm_config, "shutdown_timeout", 0) > 0
        return SchedulerHalf(scheduler, settings, engine, encoder.encode, _log, drains)
