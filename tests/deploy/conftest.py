"""Two routers behind a real proxy that runs with the configuration of deploy/."""

import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import time
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PATIENCE = 60.0
os.environ["PATH"] += ":/usr/sbin"


def load_router():
    """The router's process as the SDKs' tests start it."""
    spec = importlib.util.spec_from_file_location("sdk_conftest", ROOT / "tests/sdk/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Router


Router = load_router()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Front:
    """A proxy in front of routers, in the foreground, with its files in a folder of the test."""

    def __init__(self, kind, routers, folder):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said = folder / "log"
        command = getattr(self, kind)([router.url.removeprefix("http://") for router in routers], folder)
        with open(self.said, "wb") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        end = time.monotonic() + PATIENCE
        while not self.is_up():
            assert self.process.poll() is None and time.monotonic() < end, self.said.read_text()
            time.sleep(0.05)

    @staticmethod
    def addressed(text, addresses):
        """The configuration as it is, with the addresses of this test."""
        for number, address in enumerate(addresses):
            text, times = re.subn(rf"10\.0\.0\.1{number + 1}:8000", address, text)
            assert times == 1
        return text

    def nginx(self, addresses, folder):
        text = self.addressed((DEPLOY / "nginx/kvbaton.conf").read_text(), addresses)
        text, times = re.subn(r"listen 80;", f"listen 127.0.0.1:{self.port};", text)
        assert times == 1
        paths = "".join(
            f"{kind}_temp_path {folder}/{kind};\n" for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        )
        # Workers of a nginx that root starts are nobody, who may not write here.
        user = "user root;\n" if os.geteuid() == 0 else ""
        whole = (
            f"{user}daemon off; worker_processes 2; pid {folder}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{\naccess_log off;\n{paths}{text}\n}}\n"
        )
        (folder / "nginx.conf").write_text(whole)
        return ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]

    def haproxy(self, addresses, folder):
        text = self.addressed((DEPLOY / "haproxy/haproxy.cfg").read_text(), addresses)
        text, times = re.subn(r"bind :80\n", f"bind 127.0.0.1:{self.port}\n", text)
        assert times == 1
        (folder / "haproxy.cfg").write_text(text)
        return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]

    def is_up(self):
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=PATIENCE) as answer:
                return answer.status == 200
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)


def hold(router, *, release=False):
    """Holds streams of a router's decode engine after their first piece, or lets them go on."""
    order = {"release": ["mid_stream"]} if release else {"hold": [{"stage": "mid_stream", "leg": "decode"}]}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{router.decode}/sim/faults", json.dumps(order).encode(), head, method="POST")
    urllib.request.urlopen(request, timeout=PATIENCE).read()


@pytest.fixture
def routers():
    started = [Router("--set", "shutdown.settle=2s").wait_ready() for _ in range(2)]
    yield started
    for router in started:
        router.stop()


@pytest.fixture(params=["nginx", "haproxy"])
def front(request, routers, tmp_path):
    started = Front(request.param, routers, tmp_path)
    yield started
    started.stop()
