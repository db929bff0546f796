"""What ranks of the emulated testbed do, in its tests. Prints one line of JSON.

Sockets alone where torch adds nothing but its import.
"""

import json
import os
import socket
import subprocess
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NODES = [int(node) for node in os.environ["MEGATRON_RESILIENT_NODE_MAP"].split(",")]
SIZE = 1 << 20


def sent() -> dict[str, int]:
    """Bytes sent so far, by device."""
    with open("/proc/net/dev", encoding="ascii") as file:
        lines = [line.split(":") for line in file if ":" in line]
    return {device.strip(): int(numbers.split()[8]) for device, numbers in lines}


def shapers() -> dict[str, dict]:
    told = json.loads(subprocess.check_output(["tc", "-s", "-j", "qdisc", "show"]))
    return {each["dev"]: each for each in told if each["kind"] == "tbf"}


def address(rank: int) -> str:
    return socket.gethostbyname(f"rank{rank}")


def send_to(peer: int) -> float:
    """Sends SIZE bytes to a peer, which acknowledges them; returns the seconds."""
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection((address(peer), 5000))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with connection:
        start = time.monotonic()
        connection.sendall(bytes(SIZE))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"."
        return time.monotonic() - start


def receive(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1 << 16):
            pass
        connection.sendall(b".")


def links() -> None:
    """Rank 0 sends to every other rank, one after the other."""
    answer = {"rank": RANK, "environment": {k: os.environ[k] for k in ("LOCAL_RANK", "GROUP_RANK")}}
    if RANK == 0:
        for peer in range(1, WORLD):
            before = sent()
            seconds = send_to(peer)
            after = sent()
            answer[f"to {peer}"] = {
                "seconds": seconds,
                "sent": {device: after[device] - before[device] for device in after},
            }
        answer["shapers"] = shapers()
    else:
        with socket.create_server(("", 5000)) as listener:
            receive(listener)
    print(json.dumps(answer), flush=True)


def gloo() -> None:
    """A collective of torch through the links."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    before = sent()
    total = torch.full((SIZE // 4,), float(RANK + 1))
    dist.all_reduce(total)
    dist.barrier()
    after = sent()
    answer = {"rank": RANK, "total": total.unique().tolist()}
    answer["sent"] = {device: after[device] - before[device] for device in after}
    dist.destroy_process_group()
    print(json.dumps(answer), flush=True)


def fail() -> None:
    if RANK == 1:
        print("no good", file=sys.stderr)
        sys.exit(7)
    time.sleep(120)


def wait() -> None:
    print(json.dumps({"ready": RANK}), flush=True)
    time.sleep(120)


if __name__ == "__main__":
    {"links": links, "gloo": gloo, "fail": fail, "wait": wait}[sys.argv[1]]()
