"""No exchange lasts longer than it may, and every failure has a name."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SOON, RawServer, Stub

from kvbaton_vllm.errors import Malformed, TokenUnusable, Unreachable
from kvbaton_vllm.settings import Credentials
from kvbaton_vllm.wire import Answer, Deadline, Endpoint

StartRaw = Callable[[Callable[[socket.socket], None]], RawServer]


def get(url: str, seconds: float = SOON, credentials: Credentials | None = None) -> Answer:
    deadline = Deadline(seconds)
    with Endpoint(url, credentials or Credentials()).connect(deadline) as connection:
        return connection.exchange("GET", "/x", deadline)


def head(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(4096)
        if not piece:
            break
        received += piece
    return received


def test_an_answer_is_whole(stub: Stub) -> None:
    stub.replies = [(200, {"KV-Clock": "1.5"}, b"\x00\xff" * 100_000)]
    answer = get(stub.url + "/prefix/")
    assert answer.status == 200
    assert answer.headers["kv-clock"] == "1.5"
    assert answer.body == b"\x00\xff" * 100_000
    assert answer.sent <= answer.received
    assert stub.requests[0][:2] == ("GET", "/prefix/x")


def test_a_kept_connection_serves_many(stub: Stub) -> None:
    stub.replies = [(404, {}, b"a"), (200, {}, b""), (200, {}, b"c")]
    deadline = Deadline(SOON)
    with Endpoint(stub.url, Credentials()).connect(deadline) as connection:
        bodies = [connection.exchange("GET", "/", deadline).body for _ in range(3)]
    assert bodies == [b"a", b"", b"c"]


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable, match="cannot be reached"):
        get(f"http://127.0.0.1:{port}")


def test_no_such_host() -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        get("http://host.invalid:1")


def silent(connection: socket.socket) -> None:
    connection.recv(1)
    connection.recv(1 << 20)
    threading.Event().wait(SOON)


def drips_its_head(connection: socket.socket) -> None:
    head(connection)
    while True:
        connection.sendall(b"H")
        time.sleep(0.02)


def drips_its_body(connection: socket.socket) -> None:
    head(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def never_reads(connection: socket.socket) -> None:
    threading.Event().wait(SOON)


@pytest.mark.parametrize("serve", [silent, drips_its_head, drips_its_body, never_reads])
def test_the_deadline_holds_whatever_the_other_side_does(
    raw_server: StartRaw, serve: Callable[[socket.socket], None]
) -> None:
    server = raw_server(serve)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="did not answer in time"):
        get(server.url, 0.3)
    assert time.monotonic() - began < SOON


def test_a_large_body_into_a_full_pipe_meets_the_deadline(raw_server: StartRaw) -> None:
    server = raw_server(never_reads)
    deadline = Deadline(0.3)
    with (
        Endpoint(server.url, Credentials()).connect(deadline) as connection,
        pytest.raises(Unreachable, match="did not answer in time"),
    ):
        connection.exchange("PUT", "/", deadline, lambda: bytes(64 << 20))


def test_a_connection_that_breaks(raw_server: StartRaw) -> None:
    server = raw_server(lambda connection: None)
    with pytest.raises(Unreachable, match="broke the connection off"):
        get(server.url)


def test_an_answer_that_breaks_off(raw_server: StartRaw) -> None:
    def serve(connection: socket.socket) -> None:
        head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc")

    with pytest.raises(Unreachable, match="broke the connection off"):
        get(raw_server(serve).url)


@pytest.mark.parametrize(
    "text", [b"SSH-2.0-OpenSSH\r\n", b"\xff\x00\x00\x00\x00\x00\x00\x01\x7f\r\n"]
)
def test_something_else_than_http(raw_server: StartRaw, text: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        head(connection)
        connection.sendall(text)

    with pytest.raises(Malformed, match="does not answer in HTTP"):
        get(raw_server(serve).url)


def test_the_token_is_sent_and_may_change(stub: Stub, tmp_path: Path) -> None:
    stub.replies = [(200, {}, b"")]
    file = tmp_path / "token"
    for token in ("one\n", "two"):
        file.write_text(token)
        get(stub.url, credentials=Credentials(token="unused", token_file=str(file)))
    get(stub.url, credentials=Credentials(token="three"))
    get(stub.url)
    sent = [headers.get("authorization") for _, _, headers, _ in stub.requests]
    assert sent == ["Bearer one", "Bearer two", "Bearer three", None]


@pytest.mark.parametrize("token", ["", "two words", "line\r\nbreak", "schlüssel"])
def test_a_token_that_no_header_can_carry(stub: Stub, tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    with pytest.raises(TokenUnusable) as caught:
        get(stub.url, credentials=Credentials(token_file=str(file)))
    assert "two words" not in str(caught.value)
    assert stub.requests == []


def test_a_token_file_that_is_not_there(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(TokenUnusable, match="cannot be read"):
        get(stub.url, credentials=Credentials(token_file=str(tmp_path / "none")))


class Authority:
    """A certificate authority of its own and a server's certificate for 127.0.0.1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = self.file("ca.pem")
        self.openssl("req", "-x509", *self.key("ca.key"), "-out", self.ca, "-subj", "/CN=ca")
        self.server = self.issue("server", "subjectAltName=IP:127.0.0.1")
        self.client = self.issue("client", "extendedKeyUsage=clientAuth")

    def file(self, name: str) -> str:
        return str(self.directory / name)

    def key(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        return [*curve, "-nodes", "-keyout", self.file(name)]

    def issue(self, name: str, extension: str) -> tuple[str, str]:
        request, certificate = self.file(f"{name}.csr"), self.file(f"{name}.pem")
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(extension)
        self.openssl("req", *self.key(f"{name}.key"), "-out", request, "-subj", f"/CN={name}")
        signer = ["-CA", self.ca, "-CAkey", self.file("ca.key"), "-CAcreateserial"]
        more = ["-extfile", str(extensions), "-days", "2"]
        self.openssl("x509", "-req", "-in", request, "-out", certificate, *signer, *more)
        return certificate, self.file(f"{name}.key")

    def openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def secure(stub: Stub, authority: Authority, *, ask_for_client: bool = False) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.server)
    if ask_for_client:
        context.load_verify_locations(authority.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    stub.server.socket = context.wrap_socket(stub.server.socket, server_side=True)
    stub.server.handle_error = lambda *_: None  # type: ignore[method-assign]
    stub.replies = [(200, {}, b"over TLS")]
    return stub.url.replace("http:", "https:")


def test_tls_with_the_right_authority(stub: Stub, authority: Authority) -> None:
    url = secure(stub, authority)
    assert get(url, credentials=Credentials(ca_file=authority.ca)).body == b"over TLS"


def test_tls_with_an_unknown_authority_sends_nothing(stub: Stub, authority: Authority) -> None:
    url = secure(stub, authority)
    with pytest.raises(Unreachable, match=r"TLS failed.*certificate verify failed"):
        get(url, credentials=Credentials(token="secret"))
    assert stub.requests == []


def test_tls_with_another_name_sends_nothing(stub: Stub, authority: Authority) -> None:
    url = secure(stub, authority).replace("127.0.0.1", "localhost")
    with pytest.raises(Unreachable, match=r"TLS failed.*localhost"):
        get(url, credentials=Credentials(ca_file=authority.ca, token="secret"))
    assert stub.requests == []


def test_a_client_certificate(stub: Stub, authority: Authority) -> None:
    url = secure(stub, authority, ask_for_client=True)
    certificate, key = authority.client
    credentials = Credentials(ca_file=authority.ca, client_cert=certificate, client_key=key)
    assert get(url, credentials=credentials).body == b"over TLS"
    with pytest.raises(Unreachable):
        get(url, credentials=Credentials(ca_file=authority.ca))


def test_plain_http_where_tls_is_spoken_and_the_other_way_round(
    stub: Stub, raw_server: StartRaw
) -> None:
    stub.replies = [(200, {}, b"")]
    stub.server.handle_error = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="TLS failed"):
        get(stub.url.replace("http:", "https:"))


def test_a_tls_handshake_that_never_ends_meets_the_deadline(raw_server: StartRaw) -> None:
    server = raw_server(never_reads)
    with pytest.raises(Unreachable, match="TLS failed"):
        get(server.url.replace("http:", "https:"), 0.3)


def test_a_certificate_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be used"):
        Endpoint("https://10.0.0.2", Credentials(ca_file=str(tmp_path / "none.pem")))
