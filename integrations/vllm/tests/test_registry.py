"""The API's calls: against the real router where it can be, against canned answers for faults."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from typing import Any

import pytest
from conftest import CAPTURES, SOON, TOKEN, Router, Stub

from kvbaton_vllm.errors import Denied, Malformed, NotReady, Refused, RegistryError, Unknown
from kvbaton_vllm.registry import Echo, EngineDescription, Place, RankPayload, Registry
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Deadline, Endpoint

BASE_URL = "http://10.0.0.5:8100"


def soon() -> Deadline:
    return Deadline(SOON)


def described(engine_id: str, **more: Any) -> EngineDescription:
    return EngineDescription(engine_id, BASE_URL, "prefill", "tiny", 0, "0.32.0", more)


def rank(registry: Registry, engine_id: str, of: tuple[int, int] = (0, 0)) -> RankPayload:
    with registry.connect(soon()) as connection:
        return registry.rank(connection, engine_id, of, 0.0, soon())


def show(router: Router, engine_id: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{router.url}/registry/v1/engines/{engine_id}")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        shown: dict[str, Any] = json.load(answer)
        return shown


def test_what_one_engine_puts_another_gets_byte_for_byte(
    router: Router, payload: bytes, engine_id: str
) -> None:
    registry = router.registry()
    more = {
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "kv_heads": 8,
        "is_mla": False,
        "permute_received": False,
        "hma_required": False,
        "host_buffer": False,
        "enforce_compat": True,
        "nixl_version": "1.5.1",
        "side_channel_host": "10.0.0.5",
        "side_channel_port": 5600,
    }
    ranks = {(0, 0): payload, (0, 1): payload}
    receipt = registry.register(described(engine_id, **more), "ready", ranks, 15.0, soon())
    assert receipt.ttl == 15.0
    assert [rank(registry, engine_id, of).payload for of in ranks] == [payload, payload]
    shown = show(router, engine_id)
    expected = {**described(engine_id, **more).body(), "state": "ready", "ttl_seconds": 15.0}
    assert {key: shown[key] for key in expected} == expected
    with registry.connect(soon()) as connection:
        assert registry.place(connection, engine_id, soon()) == Place(BASE_URL, 0)


def test_the_clock_is_known_after_an_echo(router: Router, payload: bytes, engine_id: str) -> None:
    ahead = 1_000_000.0
    registry = Registry(
        Endpoint(router.url, Credentials(token=TOKEN)), lambda: time.perf_counter() + ahead
    )
    receipt = registry.register(described(engine_id), "ready", {(0, 0): payload}, 15.0, soon())
    assert rank(registry, engine_id).clock_offset is None
    echo = Echo(receipt.echo.router_clock, receipt.echo.received + ahead)
    registry.heartbeat(engine_id, "ready", echo, soon())
    offset = rank(registry, engine_id).clock_offset
    assert offset is not None
    assert ahead <= offset + 1e-3
    assert offset < ahead + SOON


def test_whoever_left_is_not_known(router: Router, payload: bytes, engine_id: str) -> None:
    registry = router.registry()
    registry.register(described(engine_id), "ready", {(0, 0): payload}, 15.0, soon())
    registry.deregister(engine_id, soon())
    registry.deregister(engine_id, soon())
    with pytest.raises(Unknown, match="not registered"):
        registry.heartbeat(engine_id, "ready", None, soon())
    with pytest.raises(Unknown, match="not registered"):
        rank(registry, engine_id)


def test_a_rank_that_is_not_there(router: Router, payload: bytes, engine_id: str) -> None:
    registry = router.registry()
    registry.register(described(engine_id), "ready", {(0, 0): payload}, 15.0, soon())
    with pytest.raises(Unknown, match="rank 0/1"):
        rank(registry, engine_id, (0, 1))


@pytest.mark.parametrize("token", ["wrong-token", None])
def test_a_wrong_token_gets_nothing_and_changes_nothing(
    router: Router, payload: bytes, engine_id: str, token: str | None
) -> None:
    wrong = router.registry(token)
    with pytest.raises(Denied, match="refuses this engine's token"):
        wrong.register(described(engine_id), "ready", {(0, 0): payload}, 15.0, soon())
    with pytest.raises(Unknown):
        rank(router.registry(), engine_id)
    router.registry().register(described(engine_id), "ready", {(0, 0): payload}, 15.0, soon())
    with pytest.raises(Denied):
        rank(wrong, engine_id)
    with pytest.raises(Denied):
        wrong.heartbeat(engine_id, "ready", None, soon())
    with pytest.raises(Denied):
        wrong.deregister(engine_id, soon())
    assert rank(router.registry(), engine_id).payload == payload


def test_another_engines_payload_is_refused(router: Router, payload: bytes) -> None:
    with pytest.raises(Refused, match="engine_id_mismatch") as caught:
        router.registry().register(described("another"), "ready", {(0, 0): payload}, 15.0, soon())
    assert caught.value.code == "engine_id_mismatch"


def test_a_payload_that_is_none_is_refused(router: Router) -> None:
    with pytest.raises(Refused, match="malformed_payload"):
        router.registry().register(described("e"), "ready", {(0, 0): b"\x00"}, 15.0, soon())


def test_an_id_with_any_character_is_one_segment(stub: Stub) -> None:
    stub.replies = [(204, {}, b"")]
    Registry(Endpoint(stub.url + "/base", Credentials())).deregister("a/b?c d%ü", soon())
    assert stub.requests[0][:2] == (
        "DELETE",
        "/base/registry/v1/engines/a%2Fb%3Fc%20d%25%C3%BC",
    )


def test_what_a_registration_looks_like(stub: Stub) -> None:
    stub.replies = [(201, {}, b'{"router_clock": 2.5, "ttl_seconds": null}')]
    registry = Registry(Endpoint(stub.url, Credentials()), lambda: 47.25)
    engine = EngineDescription("e", None, "decode", "m", 3, None, {"tp_size": 2, "nixl": None})
    receipt = registry.register(
        engine, "ready", {(1, 0): b"\x01", (0, 0): b"\x00\xff"}, 6.0, soon()
    )
    method, path, headers, body = stub.requests[0]
    assert (method, path) == ("PUT", "/registry/v1/engines/e")
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "role": "decode",
        "model": "m",
        "dp_rank": 3,
        "tp_size": 2,
        "state": "ready",
        "ttl_seconds": 6.0,
        "clock": 47.25,
        "ranks": [
            {"pp_rank": 0, "tp_rank": 0, "payload": "AP8="},
            {"pp_rank": 1, "tp_rank": 0, "payload": "AQ=="},
        ],
    }
    assert receipt.ttl is None
    assert receipt.echo.router_clock == 2.5


def test_what_a_sign_of_life_looks_like(stub: Stub) -> None:
    stub.replies = [(200, {}, b'{"router_clock": 2.5, "ttl_seconds": 6}')]
    registry = Registry(Endpoint(stub.url, Credentials()), lambda: 47.25)
    registry.heartbeat("e", "ready", None, soon())
    registry.heartbeat("e", "draining", Echo(1.5, 46.0), soon())
    bodies = [json.loads(body) for _, _, _, body in stub.requests]
    assert bodies == [
        {"state": "ready", "clock": 47.25},
        {"state": "draining", "clock": 47.25, "echo": {"router_clock": 1.5, "received": 46.0}},
    ]


NOT_UNDERSTOOD = [
    b"",
    b"<html>",
    b"\xff",
    b"[]",
    b"{}",
    b'{"router_clock": "1"}',
    b'{"router_clock": NaN, "ttl_seconds": null}',
    b'{"router_clock": true, "ttl_seconds": null}',
    b'{"router_clock": 1, "ttl_seconds": "6"}',
]


@pytest.mark.parametrize("body", NOT_UNDERSTOOD)
def test_an_acknowledgement_that_cannot_be_understood(stub: Stub, body: bytes) -> None:
    stub.replies = [(200, {}, body)]
    with pytest.raises(Malformed):
        Registry(Endpoint(stub.url, Credentials())).heartbeat("e", "ready", None, soon())


@pytest.mark.parametrize("body", [b"[]", b'{"base_url": 7, "dp_rank": 0}', b'{"base_url": "x"}'])
def test_a_description_that_cannot_be_understood(stub: Stub, body: bytes) -> None:
    stub.replies = [(200, {}, body)]
    registry = Registry(Endpoint(stub.url, Credentials()))
    with registry.connect(soon()) as connection, pytest.raises(Malformed):
        registry.place(connection, "e", soon())


def test_a_web_page_is_no_payload(stub: Stub) -> None:
    stub.replies = [(200, {"content-type": "text/html"}, b"<html>")]
    with pytest.raises(Malformed, match="something else than a payload"):
        rank(Registry(Endpoint(stub.url, Credentials())), "e")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "unknown_engine", Unknown),
        (404, "unknown_rank", Unknown),
        (404, "no_such_path", Refused),
        (409, "engine_not_ready", NotReady),
        (409, "engine_id_mismatch", Refused),
        (401, "token_missing", Denied),
        (403, "not_local", Denied),
        (507, "registry_full", Refused),
        (500, "x", Refused),
    ],
)
def test_every_refusal_has_its_name(
    stub: Stub, status: int, code: str, kind: type[RegistryError]
) -> None:
    stub.replies = [(status, {}, json.dumps({"error": {"message": "m", "code": code}}).encode())]
    with pytest.raises(RegistryError, match=code) as caught:
        rank(Registry(Endpoint(stub.url, Credentials())), "e")
    assert type(caught.value) is kind


@pytest.mark.parametrize("body", [b"", b"bad gateway", b"[]", b'{"error": "x"}', b"\xff" * 1000])
def test_a_refusal_without_a_reason(stub: Stub, body: bytes) -> None:
    stub.replies = [(502, {}, body)]
    with pytest.raises(Refused, match=r"HTTP 502, no_code") as caught:
        rank(Registry(Endpoint(stub.url, Credentials())), "e")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"kv-clock": "5.0", "kv-clock-bound": "lower"},
        {"kv-clock": "x", "kv-clock-error": "0.1"},
        {"kv-clock": "nan", "kv-clock-error": "0.1"},
        {"kv-clock": "5.0", "kv-clock-error": "inf"},
        {"kv-clock": "5.0", "kv-clock-error": "-1"},
    ],
)
def test_a_clock_that_is_not_known_exactly_is_not_known(
    stub: Stub, headers: dict[str, str]
) -> None:
    stub.replies = [(200, {"content-type": "application/msgpack", **headers}, b"p")]
    assert rank(Registry(Endpoint(stub.url, Credentials())), "e") == RankPayload(b"p", None)


def test_a_clocks_offset_is_never_too_small(stub: Stub) -> None:
    headers = {"content-type": "Application/Msgpack; a=b", "kv-clock": "5000.0"}
    stub.replies = [(200, {**headers, "kv-clock-error": "0.25"}, b"p")]
    before = time.perf_counter()
    found = rank(Registry(Endpoint(stub.url, Credentials())), "e")
    assert found.clock_offset is not None
    # The clock was 5000 at some moment between `before` and now.
    assert 5000.25 - time.perf_counter() <= found.clock_offset <= 5000.25 - before
    assert math.isfinite(found.clock_offset)


def test_the_fixture_is_a_real_engines(payload: bytes, engine_id: str) -> None:
    assert len(payload) == (CAPTURES / "sidechannel_P.response.frame0.bin").stat().st_size
    assert engine_id.isprintable()
    assert len(engine_id) >= 8
