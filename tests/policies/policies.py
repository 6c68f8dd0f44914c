"""Tables of docs/routing.md: each policy on a trace whose prompts begin alike, beside vllm-router's cache_aware, and
always, never and conditional hand-offs on a mixed workload. In real time, against simulated engines; the figures of
`kvbaton simulate` stand beside them."""

import argparse
import os
import sys

import fleet

POLICIES = [
    "joint",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "prefix_affinity",
    "kv_events",
    "session",
    "consistent_hash",
]


def vllm_router(policy):
    def command(port, prefill, decode):
        args = [os.environ["KVBATON_BENCH_VLLM_ROUTER"], "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        args += [word for url in prefill for word in ("--prefill", url)]
        args += [word for url in decode for word in ("--decode", url)]
        args += ["--policy", policy, "--port", str(port), "--log-level", "warning"]
        return args + ["--prometheus-port", str(fleet.free_ports(1)[0])]

    return command


def line(name, seen, told=None):
    hit, p50, p90, p99, itl, itl99 = seen
    text = f"| {name} | {hit:.1f} % | {p50:.0f} ms | {p90:.0f} ms | {p99:.0f} ms |"
    text += f" {told[0]:.1f} %, {told[1]:.0f} ms, {told[3]:.0f} ms |" if told else " – |"
    print(text, flush=True)


def shared_prefixes(args):
    engines = fleet.Engines()
    trace = fleet.conversations(1, args.requests, args.rate, beginnings=12, shared=768, turns=4, pause=2.0)
    print("| policy | hit rate | TTFT p50 | TTFT p90 | TTFT p99 | simulated: hit rate, p50, p99 |\n|---|---|---|---|---|---|")
    for policy in args.policy or POLICIES:
        settings = f"[routing]\nprefill = \"{policy}\"\ndecode = \"{policy}\"\n"
        with fleet.Fleet(engines, settings, kv_events=policy == "kv_events") as running:
            running.warm()
            seen = fleet.replay(running, trace).row()
        line(f"`{policy}`", seen, fleet.figures_of(fleet.simulate(engines, trace, [policy])[0]))
    if os.environ.get("KVBATON_BENCH_VLLM_ROUTER") and not args.policy:
        for policy in ("cache_aware", "round_robin"):
            with fleet.Fleet(engines, other=vllm_router(policy)) as running:
                running.warm()
                line(f"vllm-router `{policy}`", fleet.replay(running, trace).row())


def conditional(args):
    engines = fleet.Engines(prefill=2, decode=2)
    trace = fleet.mixed(1, args.requests, args.mixed_rate)
    print("| `mode` | TTFT p50 | TTFT p90 | TTFT p99 | ITL p50 | ITL p99 | decisions | simulated: TTFT p50, p99, ITL p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for mode in ("always", "never", "auto"):
        rule = f"[disaggregation]\nmode = \"{mode}\"\n"
        with fleet.Fleet(engines, rule) as running:
            # Before anything is learnt requests are split.
            if mode != "never":
                running.warm()
            seen = fleet.replay(running, trace)
        _, p50, p90, p99, itl, itl99 = seen.row()
        _, t50, _, t99, _, titl = fleet.figures_of(fleet.simulate(engines, trace, modes=[mode])[0])
        decisions = ", ".join(f"{name.split(': ')[1]} {count}" for name, count in sorted(seen.decisions.items()))
        text = f"| `{mode}` | {p50:.0f} ms | {p90:.0f} ms | {p99:.0f} ms | {itl:.1f} ms | {itl99:.0f} ms | {decisions} |"
        print(f"{text} {t50:.0f} ms, {t99:.0f} ms, {titl:.0f} ms |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["prefixes", "mixed"])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--mixed-rate", type=float, default=2.5)
    parser.add_argument("--policy", action="append")
    args = parser.parse_args()
    if args.only != "mixed":
        shared_prefixes(args)
    if args.only != "prefixes":
        print()
        conditional(args)
    if not os.environ.get("KVBATON_BENCH_VLLM_ROUTER"):
        print("KVBATON_BENCH_VLLM_ROUTER names no vllm-router, which is left out", file=sys.stderr)


main()
