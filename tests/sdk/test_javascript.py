"""The JavaScript SDK, whose tests are in its own language."""

import os
import pathlib
import subprocess


def test_javascript_sdk(router):
    here = pathlib.Path(__file__).parent
    env = {**os.environ, "KVBATON_URL": router.url, "KVBATON_DECODE": router.decode}
    command = ["node", "--test", "--test-concurrency=1", str(here / "openai.test.mjs")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
