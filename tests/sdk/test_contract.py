"""openapi.yaml against the running program: schemathesis with all its checks finds nothing."""

import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import Router

HERE = pathlib.Path(__file__).parent
CONTRACT = HERE.parent.parent / "openapi.yaml"
# Operators and engines change the fleet, which the clients' endpoints must not meet in the same router.
FLEET = "^/(admin|registry)"


@pytest.mark.parametrize("which", ["--exclude-path-regex", "--include-path-regex"])
def test_schemathesis_finds_nothing(tmp_path, which):
    router = Router().wait_ready()
    shutil.copy(HERE / "hooks.py", tmp_path)
    try:
        command = [
            str(pathlib.Path(sys.executable).parent / "schemathesis"),
            "--config-file", str(HERE / "schemathesis.toml"), "run", str(CONTRACT), "--url", router.url,
            "--phases", "examples,coverage,fuzzing", which, FLEET,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
        assert router.process.poll() is None
    finally:
        router.stop()
