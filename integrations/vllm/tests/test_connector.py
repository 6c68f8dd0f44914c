"""The class that vLLM loads, in a vLLM of a few lines: which version runs how."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from types import SimpleNamespace as Record
from typing import Any

import pytest
from test_attach import Worker
from test_version import WholeScheduler

from kvbaton_vllm.attach import SchedulerHalf, WorkerHalf
from kvbaton_vllm.settings import SettingsError

REGISTRY = {"registry": "http://127.0.0.1:9"}


class PlainConnector:
    """As much of vLLM's own connector as ours builds upon."""

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        self.connector_scheduler = WholeScheduler() if role == "scheduler" else None
        self.connector_worker = Worker() if role == "worker" else None
        if vllm_config.patched and self.connector_worker is not None:
            self.connector_worker = object()  # type: ignore[assignment]


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    return made


class Loader:
    """Loads the connector's module with a vLLM of some version."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def load(self, version: str) -> Any:
        factory = Record(get_connector_class_by_name={"NixlConnector": PlainConnector}.get)
        path = "vllm.distributed.kv_transfer.kv_connector.factory"
        parents = [path.rsplit(".", depth)[0] for depth in range(1, 5)]
        codec = Record(
            Encoder=lambda: Record(encode=bytes), Decoder=lambda _kind: Record(decode=bytes)
        )
        for made in (
            *(module(name, __path__=[]) for name in parents),
            module(path, KVConnectorFactory=factory),
            module("vllm.version", __version__=version),
            module("msgspec", msgpack=codec),
        ):
            self.patch.setitem(sys.modules, made.__name__, made)
        self.patch.delitem(sys.modules, "kvbaton_vllm.connector", raising=False)
        return importlib.import_module("kvbaton_vllm.connector")


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    yield Loader(monkeypatch)
    sys.modules.pop("kvbaton_vllm.connector", None)


def config(section: dict[str, Any], *, patched: bool = False) -> Any:
    transfer = Record(
        kv_connector_extra_config={"kvbaton": section} if section else None,
        kv_role="kv_consumer",
        enable_permute_local_kv=False,
        get_from_extra_config=lambda _key, default: default,
    )
    return Record(
        patched=patched,
        kv_transfer_config=transfer,
        parallel_config=Record(
            data_parallel_index=0, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        model_config=Record(
            use_mla=False, get_total_num_kv_heads=lambda: 1, served_model_name="m", model="m"
        ),
    )


def test_a_known_vllm_runs_over_http(loader: Loader, caplog: pytest.LogCaptureFixture) -> None:
    connector = loader.load("0.32.0").NixlConnector
    assert connector.__name__ == "NixlConnector", "vLLM compares the name"
    assert isinstance(connector(config(REGISTRY), "worker", None)._kvbaton, WorkerHalf)
    assert isinstance(connector(config(REGISTRY), "scheduler", None)._kvbaton, SchedulerHalf)
    assert "without `base_url`" in caplog.text


def test_a_known_vllm_needs_its_settings(loader: Loader) -> None:
    connector = loader.load("0.32.0").NixlConnector
    with pytest.raises(SettingsError, match="registry"):
        connector(config({}), "worker", None)


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_an_unknown_vllm_runs_plain_and_says_so(
    loader: Loader, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    connector = loader.load("0.99.0").NixlConnector(config({}), role, None)
    assert connector._kvbaton is None
    half = connector.connector_worker or connector.connector_scheduler
    assert "_nixl_handshake" not in vars(half)
    assert "set_xfer_handshake_metadata" not in vars(half)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "knows vLLM 0.32.0, but this is 0.99.0" in caplog.text
    assert "handshakes go over ZMQ" in caplog.text


def test_an_unknown_vllm_can_be_refused(loader: Loader) -> None:
    loaded = loader.load("0.99.0")
    with pytest.raises(loaded.UnsupportedVersion, match=r"but this is 0\.99\.0"):
        loaded.NixlConnector(config({"unknown_version": "refuse"}), "worker", None)


def test_an_unknown_vllm_can_be_tried(loader: Loader) -> None:
    connector = loader.load("0.99.0").NixlConnector
    section = {**REGISTRY, "unknown_version": "try"}
    assert isinstance(connector(config(section), "worker", None)._kvbaton, WorkerHalf)


@pytest.mark.parametrize(("version", "policy"), [("0.99.0", "try"), ("0.32.0", "refuse")])
def test_a_vllm_that_is_built_otherwise_is_refused(
    loader: Loader, version: str, policy: str
) -> None:
    loaded = loader.load(version)
    section = {**REGISTRY, "unknown_version": policy}
    with pytest.raises(loaded.UnsupportedVersion, match="_nixl_handshake is missing"):
        loaded.NixlConnector(config(section, patched=True), "worker", None)


def test_a_known_version_that_was_patched_runs_plain(
    loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    connector = loader.load("0.32.0").NixlConnector(config(REGISTRY, patched=True), "worker", None)
    assert connector._kvbaton is None
    assert "_nixl_handshake is missing" in caplog.text
