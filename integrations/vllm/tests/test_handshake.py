"""A look-up among registries, and what vLLM gets in the place of its socket."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import CAPTURES, SOON, RawServer, Reply, Router, Stub

from kvbaton_vllm.errors import NobodyKnows
from kvbaton_vllm.handshake import Lookup, RegistrySocket, encode_float
from kvbaton_vllm.registry import EngineDescription, Place, Registry
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Deadline, Endpoint

StartRaw = Callable[[Callable[[socket.socket], None]], RawServer]

DESCRIPTION: Reply = (200, {}, b'{"base_url": "http://10.0.0.5:8100", "dp_rank": 2}')


def payload_reply(body: bytes, clock: float | None = None) -> Reply:
    headers = {"content-type": "application/msgpack"}
    if clock is not None:
        headers |= {"kv-clock": f"{clock:.9f}", "kv-clock-error": "0.000000001"}
    return 200, headers, body


def missing(code: str = "unknown_engine") -> Reply:
    body = {"error": {"message": f"about {code}", "code": code}}
    return 404, {}, json.dumps(body).encode()


def at(url: str) -> Registry:
    return Registry(Endpoint(url, Credentials()))


@pytest.fixture
def second() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


def test_all_ranks_come_over_one_connection(stub: Stub) -> None:
    stub.replies = [payload_reply(b"r0"), DESCRIPTION, payload_reply(b"r1")]
    lookup = Lookup([at(stub.url)], "e", SOON)
    assert [lookup.rank((0, 0)).payload, lookup.rank((1, 3)).payload] == [b"r0", b"r1"]
    assert lookup.place == Place("http://10.0.0.5:8100", 2)
    lookup.close()
    assert [request[1] for request in stub.requests] == [
        "/registry/v1/engines/e/ranks/0/0",
        "/registry/v1/engines/e",
        "/registry/v1/engines/e/ranks/1/3",
    ]


def test_the_next_registry_is_asked(stub: Stub, second: Stub) -> None:
    stub.replies = [missing()]
    second.replies = [payload_reply(b"r0"), DESCRIPTION, payload_reply(b"r1")]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = at(f"http://127.0.0.1:{listener.getsockname()[1]}")
    lookup = Lookup([nobody, at(stub.url), at(second.url)], "e", SOON)
    assert lookup.rank((0, 0)).payload == b"r0"
    assert lookup.rank((0, 1)).payload == b"r1"
    assert len(stub.requests) == 1, "the registry that knows is asked first from then on"
    lookup.close()


def test_a_slow_registry_leaves_time_for_the_next(
    raw_server: StartRaw, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton_vllm.handshake._ATTEMPT", 0.2)
    slow = raw_server(lambda connection: time.sleep(SOON))
    stub.replies = [payload_reply(b"r0"), DESCRIPTION]
    lookup = Lookup([at(slow.url), at(stub.url)], "e", SOON)
    assert lookup.rank((0, 0)).payload == b"r0"
    lookup.close()


def test_an_engine_that_registers_late_is_waited_for(
    router: Router, payload: bytes, engine_id: str
) -> None:
    def register() -> None:
        engine = EngineDescription(engine_id, "http://10.0.0.5:8100")
        registry.register(engine, "ready", {(0, 0): payload}, 15.0, Deadline(SOON))

    registry = router.registry()
    lookup = Lookup([registry], engine_id, SOON)
    timer = threading.Timer(0.3, register)
    timer.start()
    assert lookup.rank((0, 0)).payload == payload
    assert lookup.place == Place("http://10.0.0.5:8100", 0)
    lookup.close()
    timer.join()


def test_the_clock_is_not_taken_from_an_answer_that_waited(stub: Stub) -> None:
    late, prompt = payload_reply(b"p", 1000.0), payload_reply(b"p", 2000.0)
    stub.replies = [missing(), late, prompt, DESCRIPTION]
    found = Lookup([at(stub.url)], "e", SOON)
    offset = found.rank((0, 0)).clock_offset
    found.close()
    assert offset is not None
    assert 2000.0 - time.perf_counter() <= offset
    paths = [request[1].rpartition("/")[2] for request in stub.requests]
    assert paths[0] == "0"
    assert paths[1].startswith("0?wait=")
    assert paths[2] == "0"


@pytest.mark.parametrize("code", ["unknown_engine", "unknown_rank", "engine_not_ready"])
def test_nobody_knows_within_the_budget(stub: Stub, code: str) -> None:
    stub.replies = [missing(code)]
    lookup = Lookup([at(stub.url)], "e", 0.4)
    with pytest.raises(NobodyKnows, match=f"rank 0/0 of engine e .* within 0.4 s: .*{code}"):
        lookup.rank((0, 0))


def test_who_is_not_patient_asks_once(stub: Stub, second: Stub) -> None:
    stub.replies = second.replies = [missing()]
    lookup = Lookup([at(stub.url), at(second.url)], "e", SOON, patient=False)
    with pytest.raises(NobodyKnows):
        lookup.rank((0, 0))
    assert (len(stub.requests), len(second.requests)) == (1, 1)


def test_a_wrong_token_is_no_reason_to_wait(stub: Stub) -> None:
    stub.replies = [(401, {}, b'{"error": {"message": "the token is wrong", "code": "token"}}')]
    lookup = Lookup([at(stub.url)], "e", SOON)
    with pytest.raises(NobodyKnows, match="refuses this engine's token"):
        lookup.rank((0, 0))
    assert len(stub.requests) == 1


def test_a_registry_that_stays_silent_uses_no_more_than_the_budget(raw_server: StartRaw) -> None:
    server = raw_server(lambda connection: time.sleep(SOON))
    began = time.monotonic()
    with pytest.raises(NobodyKnows, match="did not answer in time"):
        Lookup([at(server.url)], "e", 0.4).rank((0, 0))
    assert time.monotonic() - began < SOON / 2


def test_without_a_registry_nobody_knows() -> None:
    with pytest.raises(NobodyKnows):
        Lookup([], "e", 0.4).rank((0, 0))


def question(pp_rank: int, tp_rank: int) -> bytes:
    return bytes([0x93, 0xC4, 12]) + b"get_meta_msg" + bytes([pp_rank, tp_rank])


def decode(message: bytes) -> tuple[bytes, int, int]:
    assert message[:3] == bytes([0x93, 0xC4, 12])
    return message[3:15], message[15], message[16]


def test_the_question_is_the_one_that_vllm_asks() -> None:
    assert (CAPTURES / "sidechannel_P.request.bin").read_bytes() == question(0, 0)


def test_the_answer_is_the_one_that_vllm_expects(stub: Stub) -> None:
    stub.replies = [payload_reply(b"\x00p", time.perf_counter() + 500.0), DESCRIPTION]
    with RegistrySocket(Lookup([at(stub.url)], "e", SOON), decode) as peer:
        peer.setsockopt(27, 5000)
        start = time.perf_counter()
        peer.send(question(1, 2))
        frames = peer.recv_multipart()
        end = time.perf_counter()
    assert stub.requests[0][1] == "/registry/v1/engines/e/ranks/1/2"
    assert frames[0] == b"\x00p"
    tag, clock = struct.unpack(">Bd", frames[1])
    assert tag == 0xCB
    # vLLM's own arithmetic; the stub told its clock before the question came.
    offset = clock - (start + end) / 2
    assert offset <= 500.0 + 1e-6
    assert offset >= 500.0 - SOON


def test_a_clock_that_is_not_known_makes_every_deadline_pass(stub: Stub) -> None:
    stub.replies = [payload_reply(b"p"), DESCRIPTION]
    with RegistrySocket(Lookup([at(stub.url)], "e", SOON), decode) as peer:
        peer.send(question(0, 0))
        _, clock = peer.recv_multipart()
    assert struct.unpack(">Bd", clock)[1] == math.inf


def test_an_answer_without_a_question() -> None:
    peer = RegistrySocket(Lookup([], "e", 0.1), decode)
    with pytest.raises(NobodyKnows):
        peer.recv_multipart()


def test_a_float_as_a_real_engine_writes_it() -> None:
    captured = (CAPTURES / "sidechannel_P.response.frame1.bin").read_bytes()
    assert encode_float(struct.unpack(">Bd", captured)[1]) == captured


def test_connections_are_given_back(stub: Stub) -> None:
    stub.replies = [payload_reply(b"p"), DESCRIPTION]
    lookup = Lookup([at(stub.url)], "e", SOON)
    with RegistrySocket(lookup, decode) as peer:
        peer.send(question(0, 0))
        peer.recv_multipart()
        assert lookup._connection is not None
    assert lookup._connection is None
