"""Carries packets between two TUN devices, each after a fixed delay: `delay_line.py SECONDS DEVICE DEVICE`.

The devices are made here, and exist as long as this process. It prints "ready" when they exist, and ends when its
standard input closes. Every packet is delayed, in both directions: data, acknowledgements and handshakes. Order is
kept, and no packet is lost here.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

# From <linux/if_tun.h>.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Jumbo frames: this process handles one packet at a time, and 1 Gbit/s of them are 14,000 a second.
MTU = 9000
# Packets that the kernel holds for this process when it is late; tbf before the device limits the rate.
QUEUE = 1000


def open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "mtu", str(MTU), "txqueuelen", str(QUEUE)], check=True)
    return device


def carry(devices: list[int], delay: float) -> None:
    """Carries packets until standard input closes."""
    # For each device: the packets that came from it, and when they leave.
    held: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    while True:
        now = time.monotonic()
        for packets, target in zip(held, reversed(devices), strict=True):
            while packets and packets[0][0] <= now:
                deliver(target, packets.popleft()[1])
        due = min((packets[0][0] for packets in held if packets), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([sys.stdin, *devices], [], [], wait)
        if sys.stdin in readable:
            return
        now = time.monotonic()
        for packets, source in zip(held, devices, strict=True):
            if source in readable:
                packets.extend((now + delay, packet) for packet in waiting(source))


def waiting(source: int) -> list[bytes]:
    """Reads the packets that wait in a device, a few at a time so that the other direction is not kept waiting."""
    packets = []
    for _ in range(16):
        try:
            packets.append(os.read(source, 65536))
        except BlockingIOError:
            break
    return packets


def deliver(target: int, packet: bytes) -> None:
    try:
        os.write(target, packet)
    except OSError as error:
        # A device that is not up refuses packets with EIO. An unplugged cable would lose them too.
        if error.errno != 5:
            raise


def main() -> None:
    delay, *names = sys.argv[1:]
    devices = [open_device(name) for name in names]
    print("ready", flush=True)
    carry(devices, float(delay))


if __name__ == "__main__":
    main()
