"""Processes that find each other as those of torchrun do, forked from one that has imported what they need."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections import namedtuple

import torch

#: Exit codes of the processes, and what each has written.
Ended = namedtuple("Ended", ["codes", "output"])

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.support.preloaded"])


def _free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def _rank(rank, size, port, output, environment, work, arguments):
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(file, standard)
    of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {k: str(v) for k, v in of_torchrun.items()} | {"MASTER_ADDR": "localhost"} | environment
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        code = work(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # as a process ends that nobody tells to leave its group


def together(size, work, *arguments, folder, timeout=900, **environment):
    """Let processes call ``work``, a function of a module, with the same arguments, and wait for them."""
    port = _free_port()
    processes = [
        forked.Process(target=_rank, args=(i, size, port, folder / f"{i}.txt", environment, work, arguments))
        for i in range(size)
    ]
    for p in processes:
        p.start()
    limit = time.monotonic() + timeout
    for p in processes:
        p.join(max(0.0, limit - time.monotonic()))
        p.kill()
        p.join()
    return Ended(
        [p.exitcode for p in processes],
        [(folder / f"{i}.txt").read_text(encoding="utf-8") for i in range(len(processes))],
    )
