"""One agent of Python's nixl, steered over a socket by the Rust tests and benchmarks.

Speaks the same lines of JSON as the Rust peer in tests/nixl/peer.rs.
"""

import hashlib
import json
import socket
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


def pattern(seed: int, length: int) -> np.ndarray:
    index = np.arange(length, dtype=np.uint64)
    return ((index * np.uint64(seed) + (index >> np.uint64(8))) & np.uint64(0xFF)).astype(np.uint8)


class Peer:
    def start(self, ask):
        self.memory = np.zeros(ask["len"], dtype=np.uint8)
        config = nixl_agent_config(
            enable_prog_thread=ask["progress"] == "thread", capture_telemetry=True
        )
        self.agent = nixl_agent(ask["name"], config)
        self.base = self.memory.ctypes.data
        if ask["len"] > 0:
            self.agent.register_memory([(self.base, ask["len"], 0, "")], "DRAM")
        self.lists = {}
        self.notifications = []
        self.posted = None
        return {"name": ask["name"], "base": self.base, "blob": self.agent.get_agent_metadata().hex()}

    def fill(self, ask):
        self.memory[:] = pattern(ask["seed"], len(self.memory))
        return {}

    def digest(self, ask):
        part = self.memory[ask["offset"] : ask["offset"] + ask["len"]]
        return {"sha256": hashlib.sha256(part.tobytes()).hexdigest()}

    def add(self, ask):
        name = self.agent.add_remote_agent(bytes.fromhex(ask["blob"]))
        return {"agent": name.decode() if isinstance(name, bytes) else name}

    def list(self, agent, base, block, count):
        key = (agent, base, block, count)
        if key not in self.lists:
            rows = [(base + i * block, block, 0) for i in range(count)]
            self.lists[key] = self.agent.prep_xfer_dlist(agent, np.array(rows, dtype=np.uint64), "DRAM")
        return self.lists[key]

    def post(self, ask):
        block, count = ask["block"], ask["count"]
        local = self.list("NIXL_INIT_AGENT", self.base, block, count)
        remote = self.list(ask["agent"], ask["base"], block, count)
        message = bytes.fromhex(ask["notification"])
        handle = self.agent.make_prepped_xfer(
            ask["op"], local, np.array(ask["local"], dtype=np.int32),
            remote, np.array(ask["remote"], dtype=np.int32), message,
        )
        self.posted = (handle, time.perf_counter())
        if self.agent.transfer(handle) == "ERR":
            return {"error": "refused"}
        return {}

    def wait(self, ask):
        handle, started = self.posted
        state = "PROC"
        while state == "PROC" and time.perf_counter() - started < ask["seconds"]:
            try:
                state = self.agent.check_xfer_state(handle)
            except Exception:
                state = "ERR"
        micros = (time.perf_counter() - started) * 1e6
        result = {"state": {"DONE": "done", "ERR": "failed", "PROC": "moving"}[state], "micros": micros}
        if state == "DONE":
            measured = self.agent.get_xfer_telemetry(handle)
            result["bytes"] = measured.totalBytes
        self.agent.release_xfer_handle(handle)
        return result

    def rounds(self, ask):
        """Times whole reads of `count` blocks, from making the transfer to its end."""
        block, count = ask["block"], ask["count"]
        local = self.list("NIXL_INIT_AGENT", self.base, block, count)
        remote = self.list(ask["agent"], ask["base"], block, count)
        ids = np.arange(count, dtype=np.int32)
        shuffled = np.array(ask["remote"], dtype=np.int32) if ask["remote"] else ids
        micros = []
        for _ in range(ask["rounds"]):
            started = time.perf_counter()
            handle = self.agent.make_prepped_xfer("READ", local, ids, remote, shuffled, b"r:1")
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            micros.append((time.perf_counter() - started) * 1e6)
            self.agent.release_xfer_handle(handle)
            if state != "DONE":
                return {"error": state}
        return {"micros": micros, "inside": []}

    def notify(self, ask):
        self.agent.send_notif(ask["agent"], bytes.fromhex(ask["message"]))
        return {}

    def take(self, ask):
        started = time.perf_counter()
        taken = []
        while len(taken) < ask["count"] and time.perf_counter() - started < ask["seconds"]:
            for agent, messages in self.agent.get_new_notifs().items():
                name = agent.decode() if isinstance(agent, bytes) else agent
                taken += [[name, message.hex()] for message in messages]
        return {"notifications": taken}


def main():
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = connection.makefile("rw")
    peer = Peer()
    for line in lines:
        ask = json.loads(line)
        try:
            answer = getattr(peer, ask["do"])(ask)
        except Exception as error:  # the test sees what went wrong
            answer = {"error": f"{type(error).__name__}: {error}"}
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


main()
