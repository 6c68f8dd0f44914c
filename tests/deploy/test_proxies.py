"""nginx and HAProxy with the configurations of deploy/: streams are not held back, a leaving router costs no
request, and what is not for clients is out of their reach."""

import http.client
import json
import threading
import time

from conftest import PATIENCE, hold

HEADERS = {"content-type": "application/json"}


def connection(front):
    return http.client.HTTPConnection("127.0.0.1", front.port, timeout=PATIENCE)


def body(stream, tokens=12, prompt="Once upon a time"):
    return json.dumps({"model": "sim", "prompt": prompt, "max_tokens": tokens, "stream": stream})


def post(to, text):
    to.request("POST", "/v1/completions", text, HEADERS)
    answer = to.getresponse()
    return answer.status, answer.read().decode()


def test_the_first_event_arrives_before_the_last_is_sent(front, routers):
    for router in routers:
        hold(router)
    client = connection(front)
    client.request("POST", "/v1/completions", body(True), HEADERS)
    answer = client.getresponse()
    assert answer.status == 200
    assert answer.getheader("content-type").startswith("text/event-stream")
    # The engine sends no more until it is let: a proxy that waits for more would wait for ever.
    first = answer.readline()
    assert first.startswith(b"data: {"), first
    for router in routers:
        hold(router, release=True)
    rest = answer.read().decode()
    assert rest.rstrip().endswith("data: [DONE]") and rest.count("data: {") >= 5, rest


def test_large_bodies_reach_the_router_and_closed_doors_do_not(front):
    client = connection(front)
    # Longer than the simulated model's context: the refusal is the engine's.
    status, said = post(client, body(False, prompt="word " * 400_000))
    assert status == 400 and "context" in said, (status, said[:300])
    for path in ["/admin/peers", "/registry/v1/engines", "/metrics", "/dashboard", "/dashboard/x.js"]:
        client.request("GET", path)
        answer = client.getresponse()
        answer.read()
        assert answer.status == 404, path
    client.request("GET", "/v1/models")
    assert json.load(client.getresponse())["data"][0]["id"] == "sim"


def served(router):
    return router.metric("kvbaton_requests_total", 'outcome="served"')


def test_a_router_leaves_without_an_error_for_anybody(front, routers):
    leaving, staying = routers
    stop, lock = threading.Event(), threading.Lock()
    done, bad = [0], []

    def ask(number):
        client = connection(front)
        while not stop.is_set():
            try:
                status, said = post(client, body(number % 2 == 0))
                good = status == 200 and ("[DONE]" in said or number % 2)
            except (OSError, http.client.HTTPException) as error:
                good, status, said = False, 0, repr(error)
            with lock:
                done[0] += 1
                if not good:
                    bad.append((status, said[:300]))

    workers = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    try:
        for router in routers:
            router.until(lambda: served(router) >= 10)
        leaving.process.terminate()
        code = leaving.process.wait(timeout=PATIENCE)
        before, end = done[0], time.monotonic() + PATIENCE
        while done[0] < before + 20 and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert not bad, bad[:5]
    assert code == 0, "the router's requests ended in time"
    assert done[0] >= before + 20
    assert served(staying) >= 10
