"""Two emulated datacenters: network namespaces of this machine, joined by a link of limited rate and given delay.

Without a delay the link is a veth pair. With a delay it is a pair of TUN devices, and `delay_line.py` carries packets
between them. In both cases `tc tbf` limits the rate in each direction.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

PREFIX = "epdc"
DEVICE = "wan"
# A burst of 64 kB let gloo use half of a link of 1 Gbit/s; this one lets it use 0.74 to 0.86.
BURST, LIMIT = "256kb", "2mb"


def why_not() -> str | None:
    """Says why this process cannot make the network, or None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {' and '.join(missing)} is missing: install iproute2"
    name = f"{PREFIX}{os.getpid()}probe"
    try:
        run("ip", "netns", "add", name)
        # A container may allow namespaces and refuse to shape a device.
        run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *_tbf("100Mbit"))
    except OSError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _tbf(rate: str) -> list[str]:
    return ["tbf", "rate", rate.lower(), "burst", BURST, "limit", LIMIT]


class Network:
    """The two namespaces and their link, as a context manager.

    Args:
        rate: The rate of the link in each direction, as `tc` writes it, such as "100Mbit".
        delay: Seconds by which a packet is delayed, in each direction.

    Raises:
        OSError: A command failed; the text has the command and its message.
    """

    def __init__(self, rate: str, delay: float) -> None:
        self.rate, self.delay = rate, delay
        self.names = [f"{PREFIX}{os.getpid()}n{datacenter}" for datacenter in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._line: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        _remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def inside(self, datacenter: int) -> list[str]:
        """Returns the words before a command that runs it in a datacenter."""
        return ["ip", "netns", "exec", self.names[datacenter]]

    def _make(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        if self.delay > 0:
            self._make_delayed()
        else:
            here, there = self.names
            run("ip", "-n", here, "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", there)
        for name, own, other in zip(self.names, self.addresses, reversed(self.addresses), strict=True):
            run("ip", "-n", name, "address", "add", own, "peer", other, "dev", DEVICE)
            run("ip", "-n", name, "link", "set", DEVICE, "up")
            run("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *_tbf(self.rate))

    def _make_delayed(self) -> None:
        line = Path(__file__).with_name("delay_line.py")
        names = [f"{PREFIX}{os.getpid()}t{datacenter}" for datacenter in range(2)]
        self._line = subprocess.Popen(
            [sys.executable, str(line), str(self.delay), *names],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._line.stdout is not None
        if self._line.stdout.readline().strip() != "ready":
            raise OSError("the delay line did not start; its error is above")
        # A TUN device keeps its process when it moves to another namespace.
        for device, name in zip(names, self.names, strict=True):
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "link", "set", device, "name", DEVICE)

    def _remove(self) -> None:
        if self._line is not None:
            self._line.kill()
            self._line.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _remove_leftovers() -> None:
    """Removes the namespaces of runs that were killed and could not remove them."""
    for name in re.findall(rf"^({PREFIX}\d+\w+)", run("ip", "netns", "list"), re.MULTILINE):
        owner = int(re.sub(r"\D.*", "", name.removeprefix(PREFIX)))
        if not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends processes that were started in sessions of their own, with their children."""
    for how, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
