"""The same trace in real time against simulated engines, and in `kvbaton simulate`: how far apart are they?

Engines' timers round up, so the model gets speeds that are measured first, as an operator would measure them."""

import argparse
import statistics
import sys

import fleet


def measured(fleet_now, engines):
    """What one request at a time takes: of a step with a prompt, of a step with a token, of everything else."""

    def first(length, number):
        blocks = [9 << 56 | number << 32 | place for place in range(-(-length // fleet.BLOCK))]
        seen = fleet.replay(fleet_now, [fleet.Request(0.0, length, 8, blocks, number)])
        return seen.ttft[0], seen.itl

    short = [first(100, number) for number in range(5)]
    long = [first(2000, number) for number in range(5, 8)]
    step = statistics.median([gap for _, gaps in short + long for gap in gaps])
    at_short, at_long = (statistics.median([one for one, _ in some]) for some in (short, long))
    # 100 tokens are one step, 2,000 are 20 steps; each step takes the same, and 50 ms by its tokens.
    a_step = (at_long - at_short) / 19
    rest = at_short - a_step - step
    in_prompt = max(0.0, a_step - 100 * engines.prefill_us * 1e-6)
    return {"prefill_start": in_prompt, "decode_step": step, "rest": max(0.0, rest)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--within", type=float, default=0.10)
    args = parser.parse_args()
    engines = fleet.Engines()
    trace = fleet.conversations(1, args.requests, args.rate)
    worst, speeds = 0.0, None
    print("| policy | | hit rate | TTFT p50 | TTFT p90 | ITL p50 |\n|---|---|---|---|---|---|")
    for policy in args.policy or ["joint", "prefix_affinity", "round_robin"]:
        settings = f"[routing]\nprefill = \"{policy}\"\ndecode = \"{policy}\"\n"
        with fleet.Fleet(engines, settings) as running:
            running.warm()
            if speeds is None:
                found = measured(running, engines)
                micros = {name: round(seconds * 1e6) for name, seconds in found.items()}
                # Both legs go there and back, and the blocks are read.
                speeds = {name: f"{micros[name]}us" for name in ("prefill_start", "decode_step")}
                speeds |= {"network": f"{micros['rest'] // 5}us", "transfer": f"{micros['rest'] // 5}us", "handshake": "0s"}
                print(f"measured: {speeds}", file=sys.stderr)
            seen = fleet.replay(running, trace).row()
        told = fleet.figures_of(fleet.simulate(engines, trace, [policy], **speeds)[0])
        both = []
        for name, row in (("real time", seen), ("simulated", told)):
            both.append([row[0], row[1], row[2], row[4]])
            hit, p50, p90, itl = both[-1]
            print(f"| `{policy}` | {name} | {hit:.1f} % | {p50:.0f} ms | {p90:.0f} ms | {itl:.1f} ms |", flush=True)
        apart = [abs(one - other) / one if one else 0.0 for one, other in zip(*both)]
        print(f"{policy}: apart by {', '.join(f'{part:.1%}' for part in apart)}", file=sys.stderr)
        worst = max(worst, *apart)
    print(f"furthest apart: {worst:.1%}", file=sys.stderr)
    sys.exit(worst > args.within)


main()
