"""Runs the commands of the documentation.

A fenced block says after its language what is done with it:

  sh run [exit=N]     is run by bash; its exit code must be 0, or N. Variables and the folder last to the page's end.
  sh server [stop]    is started, and stays to the page's end; then it must leave in order. With stop, what was started
                      before it leaves first. "cargo run --release" stands for the program.
  sh norun=REASON     is not run here, for one of REASONS. Calls of kvbaton in it are parsed by a unit test.
  python run          is run by Python.
  toml file=NAME      is written to NAME in the page's folder, and must be settings that load.
  toml settings       must be settings that load.
  toml norun=REASON   is not looked at: a fragment with placeholders, or other program's.
  text|json output    is what the block before it prints. An ellipsis stands for anything in a line; alone in a line,
                      for any lines.

What only the test needs stands in a comment instead of a fence: "<!-- sh server", its lines, "-->".

Every block of sh and toml must say it. Addresses of this host get ports of the test's own, in commands, in files and
in what is expected."""

import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ["KVBATON_BIN"]
REASONS = {
    "build": "takes minutes, needs another build, or changes this host",
    "cluster": "needs a cluster or an image registry",
    "vllm": "needs engines, or several hosts",
    "fragment": "is a part of something, or has placeholders",
    "terminals": "stands for several terminals, and is run on another page",
}
PATIENCE = 60.0
FENCE = re.compile(r"^(?:```|<!-- )(.*?)\n(.*?)^(?:```|-->)$", re.M | re.S)
LOCAL = re.compile(r"(?P<host>127\.0\.0\.1|0\.0\.0\.0|localhost):(?P<port>[1-9]\d{3,4})\b")


class Wrong(Exception):
    """What a page says is not so."""


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Page:
    def __init__(self, path):
        self.path = path
        self.ports = {"8000": free_port()}
        self.servers = []
        self.folder = tempfile.TemporaryDirectory(prefix="kvbaton-docs-")
        self.work = pathlib.Path(self.folder.name)
        (self.work / "bin").mkdir()
        (self.work / "bin/kvbaton").symlink_to(PROGRAM)
        cargo = self.work / "bin/cargo"
        cargo.write_text('#!/bin/sh\n[ "$*" = "run --release" ] && exec kvbaton\n')
        cargo.chmod(0o755)
        router = f"http://127.0.0.1:{self.ports['8000']}"
        # None of KVBATON_*: the program refuses those that it does not know.
        self.env = {
            "PATH": f"{self.work}/bin:{os.environ['PATH']}",
            "HOME": self.folder.name,
            "LANG": "C.UTF-8",
            "NO_PROXY": "127.0.0.1,localhost",
            # What stands for these programs' defaults.
            "OPERATOR_ROUTER": router,
            "ENGINE_REGISTRY": router,
        }
        self.printed = None
        self.count = 0

    def local(self, text):
        def port(found):
            wanted = found["port"]
            if wanted not in self.ports:
                self.ports[wanted] = free_port()
            return f"{found['host']}:{self.ports[wanted]}"

        return LOCAL.sub(port, text)

    def as_shown(self, printed):
        """With the page's own ports."""
        for shown, own in self.ports.items():
            printed = printed.replace(f":{own}", f":{shown}")
        return printed

    def run(self):
        text = self.path.read_text()
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            try:
                self.block(found[1].split(), found[2])
            except Wrong as wrong:
                raise Wrong(f"{self.path.relative_to(ROOT)}:{line}: {wrong}") from None

    def block(self, words, code):
        kind, marks = (words or [""])[0], words[1:]
        given = dict(mark.partition("=")[::2] for mark in marks)
        if "norun" in given:
            if given["norun"] not in REASONS:
                raise Wrong(f"no such reason: {given['norun']}")
        elif "output" in given:
            if self.printed is None:
                raise Wrong("nothing was run that could have printed this")
            compare(code, self.as_shown(self.printed))
            return
        elif kind == "sh" and "run" in given:
            self.printed = self.shell(self.local(code), int(given.get("exit", 0)))
            return
        elif kind == "sh" and "server" in given:
            if "stop" in given:
                self.stop()
            self.printed = self.server(self.local(code))
            return
        elif kind == "python" and "run" in given:
            script = self.work / "block.py"
            script.write_text(self.local(code))
            self.printed = self.shell(f"{shlex.quote(sys.executable)} {script}", 0)
            return
        elif kind == "toml" and ("file" in given or "settings" in given):
            name = given.get("file") or "settings.toml"
            (self.work / name).write_text(self.local(code))
            self.shell(f"kvbaton check --only-settings --config {name}", 0)
        elif kind in ("sh", "toml"):
            raise Wrong(f"a block of {kind} that says neither how it is tested nor why not")
        else:
            return
        self.printed = None

    def shell(self, code, wanted):
        state, script = self.work / "state", self.work / "block.sh"
        state.touch()
        script.write_text(
            f"set -o pipefail\ncd {self.work}\n. {state}\nset -e\n{code}\nset +e\n"
            f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} >{state}\n"
        )
        done = subprocess.run(
            ["bash", script], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
        )
        self.count += 1
        if done.returncode != wanted:
            raise Wrong(f"exit code {done.returncode}\n{code}\n{done.stdout}{done.stderr}")
        return done.stdout

    def server(self, code):
        env = dict(self.env)
        files = "".join(file.read_text() for file in self.work.glob("*.toml") if file.name in code)
        if "listen" not in code + files:
            env["KVBATON_LISTEN"] = f"127.0.0.1:{self.ports['8000']}"
        output = self.work / f"server-{self.count}"
        script = self.work / f"server-{self.count}.sh"
        script.write_text(f"cd {self.work}\nexec {code}")
        with output.open("w") as out:
            process = subprocess.Popen(["bash", script], env=env, stdout=out, stderr=subprocess.STDOUT)
        self.servers.append((code, process, output))
        self.count += 1
        # A router says last how to try it; an engine has one line.
        last = "kvbaton engine" in code and "simulated" or "  curl "
        self.until(lambda: last in output.read_text(), process, output)
        said = output.read_text()
        listens = re.search(r"^kvbaton listens on (\S+)$", said, re.M)
        if listens:
            self.until(lambda: answers(f"{listens[1]}/readyz"), process, output)
        # What goes to the log comes with a time.
        return "".join(line for line in said.splitlines(True) if not re.match(r"\d{4}-\d\d-\d\dT", line))

    def until(self, holds, process, output):
        end = time.monotonic() + PATIENCE
        while not holds():
            if process.poll() is not None or time.monotonic() > end:
                raise Wrong(f"it did not start:\n{output.read_text()}")
            time.sleep(0.05)

    def stop(self):
        servers, self.servers = self.servers, []
        for _, process, _ in servers:
            process.send_signal(signal.SIGTERM)
        faults = []
        for code, process, output in servers:
            try:
                ended = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                ended = "none, in a minute"
            if ended != 0:
                faults.append(f"{code.strip()}: exit code {ended}\n{output.read_text()}")
        if faults:
            raise Wrong("\n".join(faults))

    def close(self):
        try:
            self.stop()
        except Wrong as wrong:
            raise Wrong(f"{self.path.relative_to(ROOT)}: {wrong}") from None
        finally:
            self.folder.cleanup()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_links(path):
    """Links to other pages and to headings lead somewhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        if not page.exists():
            raise Wrong(f"{path.relative_to(ROOT)}: {target} leads nowhere")
        if anchor and anchor not in anchors(page):
            raise Wrong(f"{path.relative_to(ROOT)}: {target}: there is no such heading")


def compare(expected, printed):
    """An ellipsis stands for anything; blanks at the ends of lines count for nothing."""
    lines = []
    for line in expected.strip().splitlines():
        line = line.strip()
        lines.append(r"(?:[^\n]*\n)*?" if line == "…" else re.escape(line).replace("…", r"[^\n]*") + r"\n")
    said = "".join(f"{line.strip()}\n" for line in printed.strip().splitlines())
    if not re.fullmatch("".join(lines), said):
        raise Wrong(f"what is printed is not what is shown:\n--- shown\n{expected}--- printed\n{printed}")


def main():
    names = sys.argv[1:] or [*sorted((ROOT / "docs").glob("*.md")), "README.md", "integrations/vllm/README.md"]
    faults, blocks = [], 0
    for name in names:
        began = time.monotonic()
        page = Page((ROOT / name).resolve())
        for step in (lambda: check_links(page.path), page.run, page.close):
            try:
                step()
            except Wrong as wrong:
                faults.append(wrong)
        blocks += page.count
        if page.count:
            print(f"{page.path.relative_to(ROOT)}: {page.count} commands, {time.monotonic() - began:.1f} s")
    for fault in faults:
        print(f"\n{fault}", file=sys.stderr)
    print(f"{len(names)} pages, {blocks} commands, {len(faults)} wrong")
    sys.exit(bool(faults))


main()
