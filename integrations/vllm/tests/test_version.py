"""Which vLLM is known, and what of it must be as expected."""

from __future__ import annotations

import pytest
from test_attach import Scheduler, Worker

from kvbaton_vllm.version import advice, is_known, missing_parts


@pytest.mark.parametrize("version", ["0.32.0", "v0.32.0", "0.32.0+cpu", "0.32.0+cu128"])
def test_the_version_that_was_tried(version: str) -> None:
    assert is_known(version)


@pytest.mark.parametrize(
    "version", ["0.32.1", "0.32.0rc1", "0.32.0.dev5", "0.32", "0.320.0", "0.13.0", "1.0", "", "dev"]
)
def test_every_other_version(version: str) -> None:
    assert not is_known(version)


def test_advice_names_both_versions() -> None:
    assert "0.32.0" in advice("0.99.1")
    assert "0.99.1" in advice("0.99.1")


class WholeScheduler(Scheduler):
    _TRANSFER_MODE = "pull"

    def __init__(self) -> None:
        super().__init__()
        self._is_hma_required = self.use_host_buffer = False
        self.engine_id = self.side_channel_host = "e"
        self.side_channel_port = self.transfer_tp_size = 1


def test_halves_that_are_as_expected() -> None:
    assert missing_parts(Worker(), scheduler=False) == []
    assert missing_parts(WholeScheduler(), scheduler=True) == []


def test_parts_that_are_missing() -> None:
    assert missing_parts(object(), scheduler=False) == [
        "object._nixl_handshake is missing",
        "object._track_remote_engine_replacement is missing",
    ]
    missing = missing_parts(Scheduler(), scheduler=True)
    assert missing[0] == "Scheduler._TRANSFER_MODE is missing"
    assert len(missing) == 7


def test_parts_that_are_others() -> None:
    class Other(Worker):
        def _nixl_handshake(  # type: ignore[override]
            self,
            host: str,
            port: int,
            remote_tp_size: int,
            expected_engine_id: str,
            remote_dcp_size: int = 1,
            remote_pp_size: int = 1,
            notif_agents_only: bool = False,
        ) -> None:
            """Opens no socket by that name."""

        def _track_remote_engine_replacement(self, engine_id: str) -> None:  # type: ignore[override]
            """Takes less."""

    assert missing_parts(Other(), scheduler=False) == [
        "Other._nixl_handshake does not open its socket with `zmq_ctx`",
        "Other._track_remote_engine_replacement takes other parameters",
    ]
