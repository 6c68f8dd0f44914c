"""The program with its embedded fleet, in a process of its own, for clients that others wrote."""

import json
import os
import subprocess
import time
import urllib.request

import pytest

BINARY = os.environ["KVBATON_BIN"]
PATIENCE = 60.0


class Router:
    """A started program and the addresses that it announced."""

    def __init__(self, *args, env=None):
        environment = {"PATH": os.environ["PATH"], "KVBATON_LISTEN": "127.0.0.1:0", **(env or {})}
        self.process = subprocess.Popen(
            [BINARY, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.prefill = self.decode = None
        for line in self.process.stdout:
            url = next((word for word in line.split() if word.startswith("http")), None)
            if "listens on" in line:
                self.url = url
            elif "prefill engine" in line and url:
                self.prefill = url
            elif "decode engine" in line and url:
                self.decode = url
            elif "curl" in line:
                break
        self.base = f"{self.url}/v1"

    def get(self, path, base=None):
        with urllib.request.urlopen(f"{base or self.url}{path}", timeout=PATIENCE) as answer:
            return answer.read().decode()

    def arm(self, engine, *faults):
        body = json.dumps({"clear": True, "arm": list(faults)}).encode()
        head = {"content-type": "application/json"}
        request = urllib.request.Request(f"{engine}/sim/faults", data=body, headers=head, method="POST")
        urllib.request.urlopen(request, timeout=PATIENCE).read()

    def metric(self, name, *labels):
        """The sum of a metric's samples that carry all these labels."""
        lines = (line for line in self.get("/metrics").splitlines() if line.startswith(name))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))

    def stats(self, engine):
        return json.loads(self.get("/sim/stats", base=engine))

    def until(self, holds):
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "it did not come to hold"
            time.sleep(0.05)

    def wait_ready(self):
        def ready():
            try:
                return self.get("/readyz") is not None
            except OSError:
                return False

        self.until(ready)
        return self

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def router():
    started = Router().wait_ready()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def every_request_is_handed_off(request):
    """Nothing that a client here sends may go past the prefill engine, nor leave blocks behind."""
    if "router" not in request.fixturenames:
        yield
        return
    router = request.getfixturevalue("router")
    yield
    router.arm(router.prefill)
    router.arm(router.decode)
    router.until(lambda: json.loads(router.get("/admin/handoffs"))["handoffs"] == [])
    assert router.metric("kvbaton_pd_bypass_total", 'reason="prefill_unavailable"') == 0


@pytest.fixture(scope="session")
def keyed(tmp_path_factory):
    """A router that wants a key; with the key."""
    made = subprocess.run([BINARY, "key", "new", "--name", "tests"], capture_output=True, text=True, check=True)
    key, entry = made.stdout.split("\n\n", 1)
    file = tmp_path_factory.mktemp("keyed") / "kvbaton.toml"
    file.write_text(entry)
    started = Router("--config", str(file)).wait_ready()
    yield started, key.strip()
    started.stop()


@pytest.fixture(scope="session")
def empty():
    """A router without any engine."""
    started = Router("--set", "fleet.embedded=never")
    yield started
    started.stop()
