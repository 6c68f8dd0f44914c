"""What the tests share: a registry that does what it is told, and a real router."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvbaton_vllm.registry import Registry
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Endpoint

REPOSITORY = Path(__file__).resolve().parents[3]
CAPTURES = REPOSITORY / "tests" / "fixtures" / "captures"
SOON = 60.0
TOKEN = "right-token"

Reply = tuple[int, dict[str, str], bytes]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


class Stub:
    """A registry of canned answers: each request takes the next one, the last one stays."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.replies: list[Reply] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                stub.requests.append((self.command, self.path, headers, body))
                replies = stub.replies
                status, sent, content = replies.pop(0) if len(replies) > 1 else replies[0]
                self.send_response(status)
                for name, value in sent.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.close()


class RawServer:
    """Accepts connections and hands each to a function."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.serve(connection)
            except OSError:
                return

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def raw_server() -> Iterator[Callable[[Callable[[socket.socket], None]], RawServer]]:
    servers: list[RawServer] = []

    def start(serve: Callable[[socket.socket], None]) -> RawServer:
        servers.append(RawServer(serve))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Router:
    """The real program on a port that stays the same when it is started anew."""

    def __init__(self, program: str, log: Path) -> None:
        self.program = program
        self.log = log
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("KVBATON_")}
        env["KVBATON_ADMIN__TOKEN"] = TOKEN
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.program,
                    f"--listen=127.0.0.1:{self.port}",
                    "--set=fleet.embedded=never",
                    "--set=shutdown.settle=0s",
                ],
                env=env,
                stdout=log,
                stderr=log,
            )
        wait_until(self.answers, "the router answers")

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(self.url + "/livez", timeout=SOON) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def registry(self, token: str | None = TOKEN) -> Registry:
        return Registry(Endpoint(self.url, Credentials(token=token)))


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    program = os.environ.get("KVBATON")
    if program is None:
        target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
        program = str(target / "debug" / "kvbaton")
    router = Router(program, tmp_path / "router.log")
    router.start()
    yield router
    router.stop()


@pytest.fixture(scope="session")
def payload() -> bytes:
    """What a real engine answered to the question for its rank."""
    return (CAPTURES / "sidechannel_P.response.frame0.bin").read_bytes()


@pytest.fixture(scope="session")
def engine_id(payload: bytes) -> str:
    """The id that the payload holds: the first field of its inner map."""
    at = payload.index(b"\xa9engine_id") + len(b"\xa9engine_id")
    length = payload[at + 1] if payload[at] == 0xD9 else payload[at] & 0x1F
    start = at + (2 if payload[at] == 0xD9 else 1)
    return payload[start : start + length].decode("ascii")
