"""A switch whose links delay and lose frames, for kernels without netem.

lossy_switch.py whole INTERFACE               on a host: frames leave it whole and with their checksums
lossy_switch.py DELAY_MS LOSS SEED PORT...    passes frames between ports, until it is killed
"""

import ctypes
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
# Checksums of sent frames, and segments of TCP and of all: left to the device otherwise, of which a raw socket has none.
OFFLOADS = {"ETHTOOL_STXCSUM": 0x17, "ETHTOOL_STSO": 0x1F, "ETHTOOL_SGSO": 0x24}
ALL_PROTOCOLS = 3


def send_whole(interface):
    with socket.socket() as any_socket:
        for command in OFFLOADS.values():
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def switch(delay_s, loss, draws, ports):
    links = []
    for port in ports:
        links.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS)))
        links[-1].bind((port, 0))
    print("ready", flush=True)
    numbers, under_way = itertools.count(), []
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for link in select.select(links, [], [], wait_s)[0]:
            frame, (_, _, kind, *_) = link.recvfrom(1 << 16)
            if kind != socket.PACKET_OUTGOING and draws.random() >= loss:
                heapq.heappush(under_way, (time.monotonic() + delay_s, next(numbers), frame, link))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, frame, source = heapq.heappop(under_way)
            for link in links:
                if link is not source:
                    link.send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        send_whole(sys.argv[2])
    else:
        delay_ms, loss, seed, *ports = sys.argv[1:]
        switch(float(delay_ms) / 1e3, float(loss), random.Random(int(seed)), ports)
