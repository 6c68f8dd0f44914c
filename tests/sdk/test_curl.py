"""curl, as documentation shows it."""

import json
import subprocess

import pytest

BODY = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8})


def curl(*args):
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *args], capture_output=True, text=True, check=True)
    return done.stdout


def posted(router, body, *more):
    head = ["-H", "Content-Type: application/json"]
    return curl(f"{router.base}/chat/completions", *head, "-d", body, *more)


def test_whole_and_streamed(router):
    whole = json.loads(posted(router, BODY))["choices"][0]["message"]["content"]
    streamed = posted(router, json.dumps({**json.loads(BODY), "stream": True}), "-N")
    events = [event.removeprefix("data: ") for event in streamed.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == whole and len(whole) == 8


def test_models_and_pages(router):
    assert json.loads(curl(f"{router.base}/models"))["data"][0]["id"] == "sim"
    assert json.loads(curl(f"{router.url}/readyz"))["ready"] is True
    assert "kvbaton_requests_total" in curl(f"{router.url}/metrics")


def test_a_large_body_with_expect(router):
    body = json.dumps({**json.loads(BODY), "metadata": {"x": "y" * 3_000_000}})
    head = ["-H", "Content-Type: application/json", "-H", "Expect: 100-continue"]
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "60", f"{router.base}/chat/completions", *head, "-d", "@-"],
        input=body, capture_output=True, text=True, check=True,
    )
    assert len(json.loads(done.stdout)["choices"][0]["message"]["content"]) == 8


@pytest.mark.parametrize(
    ("args", "status"),
    [(["-d", "{"], "400"), (["-d", BODY.replace("sim", "absent")], "404"), (["-X", "PUT"], "405")],
)
def test_errors(router, args, status):
    said = curl(f"{router.base}/chat/completions", "-H", "Content-Type: application/json", "-w", "\n%{http_code}", *args)
    body, code = said.rsplit("\n", 1)
    assert code == status and json.loads(body)["error"]["message"]


def test_keys(keyed):
    router, key = keyed
    assert json.loads(posted(router, BODY))["error"]["code"] == "invalid_api_key"
    assert json.loads(posted(router, BODY, "-H", f"Authorization: Bearer {key}"))["object"] == "chat.completion"
