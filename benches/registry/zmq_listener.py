"""The side channel's listener of a vLLM engine, without vLLM.

Reads a payload in hex from the first line, then opens a listener for each line `listen`, telling its port, and
ends the last one opened for each line `stop`. A listener is what vLLM 0.32 runs: a thread with a ROUTER socket.
"""

import sys
import threading
import time

import msgspec
import zmq


def listen(payload: bytes, bound: list[int], ready: threading.Event, stop: threading.Event) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    bound.append(socket.bind_to_random_port("tcp://127.0.0.1"))
    socket.setsockopt(zmq.RCVTIMEO, 1000)
    ready.set()
    while True:
        try:
            identity, _, request = socket.recv_multipart()
        except zmq.Again:
            if stop.is_set():
                break
            continue
        msgspec.msgpack.decode(request)
        clock = msgspec.msgpack.encode(time.perf_counter())
        socket.send_multipart((identity, b"", payload, clock))
    context.destroy(linger=0)


def main() -> None:
    payload = bytes.fromhex(sys.stdin.readline())
    print("ready", flush=True)
    stops: list[threading.Event] = []
    for line in sys.stdin:
        if line.strip() == "stop":
            stops.pop().set()
            continue
        bound: list[int] = []
        ready = threading.Event()
        stops.append(threading.Event())
        threading.Thread(target=listen, args=(payload, bound, ready, stops[-1]), daemon=True).start()
        ready.wait()
        print(bound[0], flush=True)


main()
