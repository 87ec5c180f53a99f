#!/usr/bin/env python3
"""How fast a shard is received from a peer at a restore, against the loopback's raw rate.

    python bench/transfer_probe.py [--gb 1] [--runs 5] [--json results.json]

Two processes, one connection, the same buffers.  raw: sendfile from a memfd and recv_into a mapped memfd, no digest.
transfer: the product's code, with digests on both sides.  The runs alternate; the numbers are medians.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

TOKEN = bytes(16)
ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def give(pipe: Any, size: int) -> None:
    import torch

    from ripstop.train.commit_buffer import CommitBuffer
    from ripstop.train.transfer import TransferGiver

    os.environ.update(ENV)
    torch.set_num_threads(1)
    buffer = CommitBuffer.create(size)
    buffer.bytes.view(torch.int64).random_()
    with socket.create_server(("127.0.0.1", 0)) as listener, TransferGiver(TOKEN, {0: buffer}, 2) as giver:
        pipe.send((listener.getsockname()[1], giver.port))
        connection, _ = listener.accept()
        while connection.recv(1):
            sent = 0
            while sent < size:
                sent += os.sendfile(connection.fileno(), buffer.fd, sent, size - sent)
    pipe.send("closed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    size = int(args.gb * 1e9) // 4096 * 4096

    import torch

    from ripstop.train.commit_buffer import CommitBuffer
    from ripstop.train.digest import digest
    from ripstop.train.transfer import TransferReceiver

    torch.set_num_threads(1)
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=give, args=(theirs, size))
    peer.start()
    raw_port, port = ours.recv()
    into = CommitBuffer.create(size)
    raw = socket.create_connection(("127.0.0.1", raw_port))

    def receive_raw() -> None:
        raw.send(b"x")
        view = into.memory(0, size)
        while view:
            view = view[raw.recv_into(view) :]

    def receive() -> None:
        with TransferReceiver("127.0.0.1", port, TOKEN) as receiver:
            receiver.read(0, 0, into.memory(0, size))

    rates: dict[str, list[float]] = {"raw": [], "transfer": [], "digest": []}
    for _ in range(args.runs):
        for name, what in (("raw", receive_raw), ("transfer", receive), ("digest", lambda: digest(into.bytes))):
            began = time.perf_counter()
            what()
            rates[name].append(size / (time.perf_counter() - began) / 1e9)
    raw.close()
    ours.recv()
    peer.join()
    found: dict[str, Any] = {f"{name} GB/s": statistics.median(values) for name, values in rates.items()}
    found["transfer / raw"] = found["transfer GB/s"] / found["raw GB/s"]
    print(json.dumps(found, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
