"""An engine stays registered whatever the registry goes through, and is never held up by it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SOON, TOKEN, Router, Stub, wait_until

from kvbaton_vllm.announcer import Announcer, pause_after
from kvbaton_vllm.errors import RegistryError, Unknown
from kvbaton_vllm.registry import EngineDescription, Registry
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Deadline, Endpoint

LOG = logging.getLogger("test.kvbaton")
ACKNOWLEDGED = (200, {}, b'{"router_clock": 1.0, "ttl_seconds": 1.0}')


def refusal(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    body = {"error": {"message": f"about {code}", "code": code}}
    return status, {}, json.dumps(body).encode()


@contextmanager
def announced(
    registry: Registry, payload: bytes, engine_id: str, ttl: float = 1.0
) -> Iterator[Announcer]:
    engine = EngineDescription(engine_id, "http://10.0.0.5:8100", "prefill", "tiny")
    announcer = Announcer(registry, engine, {(0, 0): payload}, ttl, LOG)
    announcer.start()
    try:
        yield announcer
    finally:
        announcer.ask_to_leave()
        announcer.join()


def payload_at(router: Router, engine_id: str) -> bytes | None:
    registry = router.registry()
    try:
        with registry.connect(Deadline(SOON)) as connection:
            return registry.rank(connection, engine_id, (0, 0), 0.0, Deadline(SOON)).payload
    except RegistryError:
        return None


def test_it_registers_stays_and_leaves(router: Router, payload: bytes, engine_id: str) -> None:
    with announced(router.registry(), payload, engine_id):
        wait_until(lambda: payload_at(router, engine_id) == payload, "registered")
        # Several leases long; without signs of life it would be gone.
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            time.sleep(0.1)
        assert payload_at(router, engine_id) == payload
    registry = router.registry()
    with pytest.raises(Unknown), registry.connect(Deadline(SOON)) as connection:
        registry.rank(connection, engine_id, (0, 0), 0.0, Deadline(SOON))


def test_its_clock_is_known_soon(router: Router, payload: bytes, engine_id: str) -> None:
    registry = router.registry()

    def clock_is_known() -> bool:
        try:
            with registry.connect(Deadline(SOON)) as connection:
                found = registry.rank(connection, engine_id, (0, 0), 0.0, Deadline(SOON))
        except Unknown:
            return False
        return found.clock_offset is not None and abs(found.clock_offset) < 1.0

    # One interval is longer than the test may take: the first echo does not wait for it.
    with announced(registry, payload, engine_id, ttl=10 * SOON):
        wait_until(clock_is_known, "the clock is known")


def test_a_registry_that_was_restarted_learns_again(
    router: Router, payload: bytes, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with announced(router.registry(), payload, engine_id):
        wait_until(lambda: payload_at(router, engine_id) == payload, "registered")
        router.stop()
        wait_until(lambda: "gave no sign of life" in caplog.text, "the loss is told")
        router.start()
        wait_until(lambda: payload_at(router, engine_id) == payload, "registered again")
    assert "no longer knows engine" in caplog.text
    assert "the engine serves meanwhile" in caplog.text


def test_a_registry_that_comes_later(
    router: Router, payload: bytes, engine_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    router.stop()
    with announced(router.registry(), payload, engine_id):
        wait_until(lambda: "cannot be reached" in caplog.text, "the absence is told")
        router.start()
        wait_until(lambda: payload_at(router, engine_id) == payload, "registered")


def test_a_wrong_token_is_told_once_and_may_be_mended(
    router: Router,
    payload: bytes,
    engine_id: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "token"
    file.write_text("hunter2")
    registry = Registry(Endpoint(router.url, Credentials(token_file=str(file))))
    with announced(registry, payload, engine_id):
        wait_until(lambda: "refuses this engine's token" in caplog.text, "the refusal is told")
        assert "check KVBATON_TOKEN or token_file" in caplog.text
        assert payload_at(router, engine_id) is None
        file.write_text(TOKEN)
        wait_until(lambda: payload_at(router, engine_id) == payload, "registered")
    complaints = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(complaints) == 1
    assert "hunter2" not in caplog.text


def test_signs_of_life_come_thrice_a_lease_and_echo(stub: Stub) -> None:
    stub.replies = [ACKNOWLEDGED]
    with announced(Registry(Endpoint(stub.url, Credentials())), b"p", "e", ttl=60.0):
        wait_until(lambda: len(stub.requests) >= 4, "signs of life")
    methods = [request[0] for request in stub.requests]
    assert methods[:4] == ["PUT", "POST", "POST", "POST"]
    assert methods[-1] == "DELETE"
    beats = [json.loads(request[3]) for request in stub.requests if request[0] == "POST"]
    for beat in beats:
        assert beat["echo"]["router_clock"] == 1.0
        assert beat["echo"]["received"] <= beat["clock"]
    # The registry's answer says 1 s although 60 s were asked for: a third of it lies between two.
    assert beats[2]["clock"] - beats[1]["clock"] >= 1.0 / 3.0


def test_an_engine_that_drains_says_so_and_goes_on(stub: Stub) -> None:
    stub.replies = [ACKNOWLEDGED]
    with announced(Registry(Endpoint(stub.url, Credentials())), b"p", "e", ttl=60.0) as announcer:
        wait_until(lambda: len(stub.requests) >= 2, "registered")
        announcer.ask_to_drain()
        wait_until(lambda: b'"draining"' in stub.requests[-1][3], "told")
        told = len(stub.requests)
        stub.replies = [refusal(404, "unknown_engine"), ACKNOWLEDGED]
        wait_until(lambda: len(stub.requests) >= told + 3, "registered again")
    assert [json.loads(r[3])["state"] for r in stub.requests[told : told + 3]] == ["draining"] * 3
    assert [r[0] for r in stub.requests[told : told + 3]] == ["POST", "PUT", "POST"]
    assert stub.requests[-1][0] == "DELETE"


def test_a_registry_that_forgets_is_told_again_at_once(stub: Stub) -> None:
    unknown = refusal(404, "unknown_engine")
    stub.replies = [ACKNOWLEDGED, unknown, ACKNOWLEDGED, ACKNOWLEDGED]
    with announced(Registry(Endpoint(stub.url, Credentials())), b"p", "e"):
        wait_until(lambda: len(stub.requests) >= 4, "registered again")
    assert [request[0] for request in stub.requests][:4] == ["PUT", "POST", "PUT", "POST"]


def test_nonsense_and_refusals_do_not_end_it(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    stub.replies = [
        (200, {}, b"<html>"),
        refusal(507, "registry_full"),
        (500, {}, b""),
        ACKNOWLEDGED,
    ]
    with announced(Registry(Endpoint(stub.url, Credentials())), b"p", "e"):
        wait_until(lambda: len(stub.requests) >= 5, "registered after all")
    assert "something else than JSON" in caplog.text
    assert "registry_full" in caplog.text


def test_an_unforeseen_error_does_not_end_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton_vllm.announcer._LONGEST_PAUSE", 0.01)
    tried = threading.Semaphore(0)

    class Broken(Registry):
        def register(self, *_arguments: object) -> object:  # type: ignore[override]
            tried.release()
            raise ZeroDivisionError

    registry = Broken(Endpoint("http://127.0.0.1:9", Credentials()))
    with announced(registry, b"p", "e"):
        for _ in range(2):
            assert tried.acquire(timeout=SOON)
    assert "could not be announced" in caplog.text


def test_leaving_does_not_wait_for_a_registry_that_is_gone(stub: Stub) -> None:
    stub.replies = [ACKNOWLEDGED]
    with announced(Registry(Endpoint(stub.url, Credentials())), b"p", "e") as announcer:
        wait_until(lambda: len(stub.requests) >= 2, "registered")
        stub.close()
        announcer.ask_to_leave()
        announcer.join()
        assert not announcer._thread.is_alive()


def test_pauses_grow_and_end_growing() -> None:
    assert [pause_after(n, 1.0) for n in (1, 2, 3, 7, 100)] == [0.25, 0.5, 1.0, 15.0, 15.0]
    assert pause_after(7, 0.0) == 7.5
