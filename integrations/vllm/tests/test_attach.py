"""The registry in the place of the side channel, in halves that are built as vLLM's are."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, SOON, TOKEN, Router, Stub, wait_until
from test_handshake import DESCRIPTION, decode, missing, payload_reply, question

from kvbaton_vllm.attach import SchedulerHalf, WorkerHalf
from kvbaton_vllm.errors import NobodyKnows
from kvbaton_vllm.registry import EngineDescription
from kvbaton_vllm.settings import Settings

LOG = logging.getLogger("test.kvbaton")
ACKNOWLEDGED = (201, {}, b'{"router_clock": 1.0, "ttl_seconds": 60.0}')


def settings(**section: Any) -> Settings:
    section = {"budget": 1, "last_will": "off", **section}
    return Settings.read({"kvbaton": section}, {"KVBATON_TOKEN": TOKEN})


class PlainSocket:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def send(self, message: bytes) -> None:
        self.log.append("sent over ZMQ")

    def recv_multipart(self) -> list[bytes]:
        return [b"over ZMQ", b"clock"]


@contextlib.contextmanager
def zmq_ctx(kind: int, path: str) -> Iterator[PlainSocket]:
    yield PlainSocket([path])


class Worker:
    """As much of vLLM's worker as the handshake has to do with."""

    def __init__(self) -> None:
        self.tracked: list[tuple[str, str, int]] = []
        self.fails = False

    def _nixl_handshake(
        self,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        remote_dcp_size: int = 1,
        remote_pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> tuple[dict[tuple[int, int], bytes], float]:
        agents = {}
        with zmq_ctx(3, f"tcp://{host}:{port}") as sock:
            for pp in range(remote_pp_size):
                for tp in range(remote_tp_size):
                    sock.send(question(pp, tp))
                    agents[(pp, tp)], _clock = sock.recv_multipart()
                    if self.fails:
                        raise RuntimeError("hash mismatch")
        return agents, 0.0

    def _track_remote_engine_replacement(self, engine_id: str, host: str, port: int) -> None:
        self.tracked.append((engine_id, host, port))


def attached(**section: Any) -> tuple[Worker, WorkerHalf]:
    worker = Worker()
    return worker, WorkerHalf(worker, settings(**section), decode, LOG)


def test_a_worker_shakes_hands_over_http_by_its_own_code(stub: Stub) -> None:
    stub.replies = [payload_reply(b"a"), DESCRIPTION, payload_reply(b"b")]
    worker, _half = attached(registry=stub.url)
    agents, _ = worker._nixl_handshake("localhost", 5600, 1, "e", 1, remote_pp_size=2)
    assert agents == {(0, 0): b"a", (1, 0): b"b"}
    assert stub.requests[0][2]["authorization"] == f"Bearer {TOKEN}"
    plain, _ = Worker()._nixl_handshake("localhost", 5600, 1, "e")
    assert plain == {(0, 0): b"over ZMQ"}, "another worker's handshake is as it was"


def test_a_peer_replaces_whoever_was_at_its_http_address(stub: Stub) -> None:
    stub.replies = [payload_reply(b"a"), DESCRIPTION]
    worker, _half = attached(registry=stub.url)
    worker._nixl_handshake("localhost", 5600, 1, "e")
    worker._track_remote_engine_replacement("e", "localhost", 5600)
    worker._track_remote_engine_replacement("other", "localhost", 5600)
    assert worker.tracked == [("e", "http://10.0.0.5:8100", 2), ("other", "localhost", 5600)]


@pytest.mark.parametrize(("hand_off", "place"), [("side_channel", ("h", 1)), ("http", ("e", 0))])
def test_a_peer_without_a_known_address(stub: Stub, hand_off: str, place: tuple[str, int]) -> None:
    stub.replies = [payload_reply(b"a"), (200, {}, b'{"base_url": null, "dp_rank": 0}')]
    worker, _half = attached(registry=stub.url, hand_off=hand_off)
    worker._nixl_handshake("h", 1, 1, "e")
    worker._track_remote_engine_replacement("e", "h", 1)
    assert worker.tracked == [("e", *place)], "peers behind one registry never replace each other"


def test_the_hand_off_names_the_registry(stub: Stub) -> None:
    stub.replies = [payload_reply(b"a"), DESCRIPTION]
    worker, _half = attached(hand_off="http")
    host, port = stub.server.server_address[:2]
    agents, _ = worker._nixl_handshake(str(host), int(port), 1, "e")
    assert agents == {(0, 0): b"a"}


def test_its_own_registry_comes_before_the_hand_offs(stub: Stub) -> None:
    stub.replies = [payload_reply(b"a"), DESCRIPTION]
    worker, _half = attached(registry=stub.url, hand_off="http")
    agents, _ = worker._nixl_handshake("::1", 1, 1, "e")
    assert agents == {(0, 0): b"a"}


def test_an_unknown_peer_is_not_asked_over_zmq(stub: Stub) -> None:
    stub.replies = [missing()]
    worker, _half = attached(registry=stub.url)
    with pytest.raises(NobodyKnows, match="engine e was not found"):
        worker._nixl_handshake("localhost", 5600, 1, "e")


def test_an_unknown_peer_is_asked_over_zmq_where_that_is_on(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    stub.replies = [missing()]
    worker, _half = attached(registry=stub.url, side_channel="on")
    agents, _ = worker._nixl_handshake("localhost", 5600, 1, "e")
    assert agents == {(0, 0): b"over ZMQ"}
    assert len(stub.requests) == 1
    assert "asking localhost:5600 over ZMQ" in caplog.text


def test_what_vllm_refuses_stays_refused(stub: Stub) -> None:
    stub.replies = [payload_reply(b"a"), DESCRIPTION]
    worker, _half = attached(registry=stub.url, side_channel="on")
    worker.fails = True
    with pytest.raises(RuntimeError, match="hash mismatch"):
        worker._nixl_handshake("localhost", 5600, 1, "e")
    worker._track_remote_engine_replacement("e", "localhost", 5600)
    assert worker.tracked == [("e", "localhost", 5600)]


class Scheduler:
    """As much of vLLM's scheduler half as the listener has to do with."""

    def __init__(self) -> None:
        self.listening = False
        self.shut_down = 0

    def set_xfer_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.listening = True

    def shutdown(self) -> None:
        self.shut_down += 1


def scheduler_half(scheduler: Scheduler, **section: Any) -> SchedulerHalf:
    engine = EngineDescription("e", "http://10.0.0.5:8100", "prefill")
    return SchedulerHalf(scheduler, settings(**section), engine, lambda text: text.encode(), LOG)


def test_a_scheduler_registers_instead_of_listening(stub: Stub) -> None:
    stub.replies = [ACKNOWLEDGED]
    scheduler = Scheduler()
    scheduler_half(scheduler, registry=stub.url)
    scheduler.set_xfer_handshake_metadata({(0, 0): "a", (0, 1): "b"})
    wait_until(lambda: len(stub.requests) >= 2, "registered")
    ranks = json.loads(stub.requests[0][3])["ranks"]
    assert [rank["payload"] for rank in ranks] == ["YQ==", "Yg=="]
    assert not scheduler.listening
    scheduler.shutdown()
    scheduler.shutdown()
    assert stub.requests[-1][0] == "DELETE"
    assert [request[0] for request in stub.requests].count("DELETE") == 1
    assert scheduler.shut_down == 2


def test_it_listens_besides_where_that_is_on(stub: Stub) -> None:
    stub.replies = [ACKNOWLEDGED]
    scheduler = Scheduler()
    scheduler_half(scheduler, registry=stub.url, side_channel="on")
    scheduler.set_xfer_handshake_metadata({(0, 0): "a"})
    assert scheduler.listening
    scheduler.shutdown()


def test_it_registers_at_every_registry(stub: Stub, router: Router, payload: bytes) -> None:
    stub.replies = [ACKNOWLEDGED]
    scheduler = Scheduler()
    scheduler_half(scheduler, registry=[stub.url, router.url])
    scheduler.set_xfer_handshake_metadata({})
    wait_until(lambda: len(stub.requests) >= 2, "registered at one")
    wait_until(lambda: '"e"' in listed(router), "registered at the other")
    scheduler.shutdown()
    assert '"e"' not in listed(router)


def listed(router: Router) -> str:
    request = urllib.request.Request(router.url + "/registry/v1/engines")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        return str(answer.read().decode())


def test_publishing_does_not_wait_for_a_registry_that_is_not_there() -> None:
    scheduler = Scheduler()
    scheduler_half(scheduler, registry="http://127.0.0.1:9")
    scheduler.set_xfer_handshake_metadata({(0, 0): "a"})
    scheduler.shutdown()
    assert scheduler.shut_down == 1


PROGRAM = """
import signal, sys
from test_attach import Scheduler, scheduler_half
def handler(number, frame):
    print("handled", flush=True)
signal.signal(signal.SIGTERM, handler)
scheduler = Scheduler()
half = scheduler_half(scheduler, registry=sys.argv[1], last_will=sys.argv[3])
half._drains = sys.argv[2] == "drains"
scheduler.set_xfer_handshake_metadata({(0, 0): "a"})
print("published", flush=True)
sys.stdin.read(1)
scheduler.shutdown()
"""


@contextlib.contextmanager
def engine_process(stub: Stub, mode: str, last_will: str) -> Iterator[subprocess.Popen[str]]:
    """An engine of a few lines in a process of its own, registered."""
    stub.replies = [ACKNOWLEDGED]
    package = REPOSITORY / "integrations" / "vllm"
    path = [str(package), str(Path(__file__).parent), *sys.path]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, stub.url, mode, last_will],
        env={"PYTHONPATH": ":".join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n"
        wait_until(lambda: len(stub.requests) >= 2, "registered")
        yield process


def end_in_order(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("x")
    process.stdin.close()
    assert process.wait(SOON) == 0


@pytest.mark.parametrize(
    ("mode", "method", "state"), [("aborts", "DELETE", None), ("drains", "POST", "draining")]
)
def test_sigterm_is_heard_at_once_and_passed_on(
    stub: Stub, mode: str, method: str, state: str | None
) -> None:
    with engine_process(stub, mode, "off") as process:
        assert process.stdout is not None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "handled\n"
        wait_until(lambda: len(stub.requests) >= 3, "told before the shutdown")
        told = stub.requests[2]
        assert told[0] == method
        assert (json.loads(told[3])["state"] if told[3] else None) == state
        end_in_order(process)
    assert stub.requests[-1][0] == "DELETE"


def test_a_killed_engine_leaves_all_the_same(stub: Stub) -> None:
    with engine_process(stub, "aborts", "on") as process:
        process.kill()
        process.wait(SOON)
        wait_until(lambda: stub.requests[-1][0] == "DELETE", "its last will is done")
    assert stub.requests[-1][1] == "/registry/v1/engines/e"
    assert stub.requests[-1][2]["authorization"] == f"Bearer {TOKEN}"


def test_the_last_will_is_nobodys_child(stub: Stub) -> None:
    with engine_process(stub, "aborts", "on") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: all(is_zombie(pid) for pid in children.read_text().split()), "orphaned")
        process.kill()
        process.wait(SOON)
        wait_until(lambda: stub.requests[-1][0] == "DELETE", "its last will is done")


def is_zombie(pid: str) -> bool:
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def test_an_engine_that_left_in_order_has_no_last_will(stub: Stub) -> None:
    with engine_process(stub, "aborts", "on") as process:
        end_in_order(process)
    assert [request[0] for request in stub.requests].count("DELETE") == 1
