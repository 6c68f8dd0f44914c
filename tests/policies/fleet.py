"""A fleet of simulated engines in processes of their own, a router before it, and a trace that is replayed to it in
real time."""

import asyncio
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import socket
import subprocess
import tempfile
import time
import urllib.request

PROGRAM = os.environ["KVBATON_BIN"]
BLOCK = 64
LONGEST = 8000
PATIENCE = 60.0
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."


@dataclasses.dataclass
class Engines:
    """How many there are, and how fast: microseconds for a prompt token and for a step of tokens."""

    prefill: int = 4
    decode: int = 4
    prefill_us: int = 500
    decode_us: int = 20_000
    blocks: int = 1025

    def settings(self, prefill_start="0ms", decode_step=None, network="1ms", transfer="2ms", handshake="10ms"):
        """The same engines for `kvbaton simulate`."""
        group = (
            f"prefill_tokens_per_second = {1e6 / self.prefill_us}\nprefill_start = \"{prefill_start}\"\n"
            f"decode_step = \"{decode_step or f'{self.decode_us}us'}\"\ndecode_sequence = \"0s\"\n"
            f"max_num_batched_tokens = 2048\nlongest_step = \"50ms\"\nkv_tokens = {(self.blocks - 1) * 16}\n"
            f"kv_bytes_per_token = 128\ntransfer_start = \"{transfer}\"\nhandshake = \"{handshake}\"\n"
            f"network = \"{network}\"\n"
        )
        roles = [("prefill", self.prefill), ("decode", self.decode)]
        groups = [f"[[engines]]\nrole = \"{role}\"\ncount = {count}\n{group}" for role, count in roles if count]
        return "bytes_per_token = 1.0\n" + "\n".join(groups)


@dataclasses.dataclass
class Request:
    at: float
    input: int
    output: int
    blocks: list
    session: int

    def prompt(self):
        return "".join(text_of(block) for block in self.blocks)[: self.input]


def text_of(block):
    dice = random.Random(block)
    return "".join(dice.choices(ALPHABET, k=BLOCK))


def conversations(seed, requests, rate, beginnings=8, shared=512, turns=3, pause=3.0, added=400, output=24, spread=0.4):
    """Conversations whose first prompts begin alike in groups, and whose next prompts go on where they were."""
    dice = random.Random(seed)
    made, conversation, began = [], 0, 0.0
    while len(made) < requests:
        group, at = dice.randrange(beginnings), began
        blocks, length = [group << 32 | number for number in range(shared // BLOCK)], shared
        for _ in range(min(turns, requests - len(made))):
            length += max(1, round(added * math.exp(dice.gauss(-spread * spread / 2, spread))))
            if length > LONGEST:
                break
            own = 1 << 48 | conversation << 24
            whole = length // BLOCK
            blocks += [own | number for number in range(len(blocks), whole)]
            last = [own | 1 << 20 | length] if length % BLOCK else []
            out = max(1, round(output * math.exp(dice.gauss(-spread * spread / 2, spread))))
            made.append(Request(at, length, out, blocks + last, conversation))
            at += dice.expovariate(1 / pause) if pause else 0.0
        conversation += 1
        began += dice.expovariate(rate / turns)
    return sorted(made, key=lambda one: one.at)


def mixed(seed, requests, rate, long=3000, short=120, part=0.3, output=48):
    """Short prompts and long ones that have nothing in common."""
    dice, made, at = random.Random(seed), [], 0.0
    for number in range(requests):
        mean = long if dice.random() < part else short
        length = min(LONGEST, max(16, round(mean * math.exp(dice.gauss(-0.08, 0.4)))))
        blocks = [1 << 50 | number << 16 | place for place in range(-(-length // BLOCK))]
        made.append(Request(at, length, max(2, round(dice.gauss(output, output / 4))), blocks, number))
        at += dice.expovariate(rate)
    return made


def write(trace, path):
    """As JSON lines that `kvbaton simulate --block-tokens 64` reads."""
    with path.open("w") as out:
        for one in trace:
            line = {"timestamp": one.at * 1000, "input_length": one.input, "output_length": one.output}
            print(json.dumps(line | {"hash_ids": one.blocks, "session_id": f"s{one.session}"}), file=out)


def free_ports(count):
    taken = [socket.socket() for _ in range(count)]
    for one in taken:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def get(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.read().decode()


class Fleet:
    """Engines, kvbaton, and another router if a command line for one is given; all ends with the `with`."""

    def __init__(self, engines, settings="", other=None, kv_events=False):
        self.engines, self.processes = engines, []
        self.folder = tempfile.TemporaryDirectory(prefix="kvbaton-fleet-")
        count = engines.prefill + engines.decode
        ports = free_ports(2 + 2 * count)
        self.router, self.port = ports[0], ports[0]
        addresses = ports[2 : 2 + count]
        events = ports[2 + count :]
        roles = ["prefill"] * engines.prefill + ["decode"] * engines.decode
        self.urls = {role: [] for role in ("prefill", "decode")}
        text = settings + "\n"
        for role, port, event in zip(roles, addresses, events):
            url = f"http://127.0.0.1:{port}"
            self.urls[role].append(url)
            text += f"[[{role}]]\nurl = \"{url}\"\n"
            args = ["engine", "--role", role, "--listen", f"127.0.0.1:{port}", "--blocks", str(engines.blocks)]
            args += ["--registry", f"http://127.0.0.1:{self.router}"]
            args += ["--prefill-us", str(engines.prefill_us), "--decode-us", str(engines.decode_us)]
            if kv_events:
                text += f"kv_events = \"tcp://127.0.0.1:{event}\"\n"
                args += ["--kv-events", f"127.0.0.1:{event}"]
            self.start([PROGRAM, *args], f"{role}-{port}")
        file = pathlib.Path(self.folder.name) / "router.toml"
        file.write_text(text)
        self.start([PROGRAM, "--config", str(file), "--listen", f"127.0.0.1:{self.router}"], "router")
        self.until(lambda: "200" if get(f"http://127.0.0.1:{self.router}/readyz") else "")
        self.until(lambda: get(f"http://127.0.0.1:{self.router}/registry/v1/engines").count("\"engine_id\"") >= count)
        if other:
            self.port = ports[1]
            self.start(other(self.port, self.urls["prefill"], self.urls["decode"]), "other")
            self.until(lambda: get(f"http://127.0.0.1:{self.port}/health") is not None)

    def start(self, command, name):
        log = (pathlib.Path(self.folder.name) / f"{name}.log").open("w")
        # What the program does not know it refuses.
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")}
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))

    def until(self, holds):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                if holds():
                    return
            except OSError:
                pass
            if time.monotonic() > end or any(process.poll() is not None for process in self.processes):
                raise SystemExit(f"the fleet did not start: {self.logs()}")
            time.sleep(0.1)

    def logs(self):
        files = pathlib.Path(self.folder.name).glob("*.log")
        return "\n".join(f"{file.name}: {file.read_text()[-800:]}" for file in files)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(PATIENCE)
        self.folder.cleanup()

    def counted(self, role, metric):
        """A counter, over the engines of a role."""
        pages = [get(f"{url}/metrics") for url in self.urls[role]]
        return sum(float(value) for page in pages for value in re.findall(rf"^{metric}(?:{{.*?}})? (\S+)$", page, re.M))

    def decisions(self):
        page = get(f"http://127.0.0.1:{self.router}/metrics")
        found = re.findall(r'^kvbaton_pd_decisions_total{decision="(\w+)",reason="(\w+)"} (\S+)$', page, re.M)
        return {f"{decision}: {reason}": int(float(value)) for decision, reason, value in found if float(value)}

    def warm(self):
        """Handshakes of all pairs: as many requests as there are, with prompts that nobody else has."""
        count = 2 * self.engines.prefill * self.engines.decode
        requests = [Request(0.05 * number, 32, 1, [7 << 56 | number], number) for number in range(count)]
        replay(self, requests)

    def hit_rate(self):
        looked_up = self.counted("prefill", "vllm:prefix_cache_queries_total")
        found = self.counted("prefill", "vllm:prefix_cache_hits_total")
        return found, looked_up


@dataclasses.dataclass
class Seen:
    ttft: list
    itl: list
    hit_rate: float
    decisions: dict

    def row(self):
        return [self.hit_rate * 100, *(1000 * quantile(self.ttft, part) for part in (0.5, 0.9, 0.99))] + [
            1000 * quantile(self.itl, part) for part in (0.5, 0.99)
        ]


def quantile(values, part):
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else float("nan")


async def ask(port, request, begin):
    await asyncio.sleep(max(0.0, begin + request.at - time.monotonic()))
    body = {"model": "sim", "prompt": request.prompt(), "max_tokens": request.output, "stream": True}
    text = json.dumps(body | {"ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"x-session-id: {request.session}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    sent = time.monotonic()
    writer.write(head.encode() + text)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"{status!r} {await reader.read()!r}")
    times = []
    while line := await reader.readline():
        # In one event there may be several tokens, where a reader is slow.
        if line.startswith(b"data: {") and b'"choices":[{' in line.replace(b" ", b""):
            times.append(time.monotonic())
    writer.close()
    if not times:
        raise SystemExit("an answer without tokens")
    return times[0] - sent, [after - before for before, after in zip(times, times[1:])]


def replay(fleet, trace):
    """Sends a trace in real time: what its clients saw."""

    async def all_of_it():
        begin = time.monotonic() + 0.2
        return await asyncio.gather(*(ask(fleet.port, request, begin) for request in trace))

    before = fleet.hit_rate()
    answers = asyncio.run(all_of_it())
    after = fleet.hit_rate()
    part = (after[0] - before[0]) / max(1.0, after[1] - before[1])
    return Seen([one for one, _ in answers], [gap for _, gaps in answers for gap in gaps], part, fleet.decisions())


def simulate(engines, trace, policies=(), modes=(), more="", **speeds):
    """The same in `kvbaton simulate`: its reports."""
    with tempfile.TemporaryDirectory(prefix="kvbaton-fleet-") as folder:
        fleet, lines = pathlib.Path(folder) / "fleet.toml", pathlib.Path(folder) / "trace.jsonl"
        fleet.write_text(engines.settings(**speeds) + more)
        write(trace, lines)
        args = [PROGRAM, "simulate", "--json", "--fleet", str(fleet), "--trace", str(lines), "--block-tokens", str(BLOCK)]
        args += [word for policy in policies for word in ("--policy", policy)]
        args += [word for mode in modes for word in ("--disaggregation", mode)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")}
        return json.loads(subprocess.run(args, check=True, capture_output=True, text=True, env=env).stdout)


def figures_of(report):
    """A report's row, as [`Seen.row`] has them."""
    of_prefill = [one for one in report["engines"] if one["role"] == "prefill"]
    looked = sum(one["requests"] for one in of_prefill)
    hit_rate = report["hit_rate"] if looked else 0.0
    ttft, itl = report["ttft"], report["itl"]
    return [hit_rate * 100, *(1000 * ttft[part] for part in ("p50", "p90", "p99"))] + [
        1000 * itl[part] for part in ("p50", "p99")
    ]
