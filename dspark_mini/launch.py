"""Start ranks as child processes of this one, and never leave any behind.

`torchrun` is the usual way to start ranks, but it stops all of them when one dies. To lose a rank and carry on, the
parent must be no rank itself: it hosts the store where ranks meet, watches its children, and collects their results.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

__all__ = ["RanksFailed", "connect", "join_group", "run_ranks"]


class RanksFailed(RuntimeError):
    """A rank raised, died or took too long; the message holds what is known about each."""


def connect(port, timeout_s=60.0):
    """The parent's store, seen from a rank."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(store, name, rank, num_ranks, *, timeout_s, cuda=False):
    """Make the default process group, whose ranks meet in `store` under `name`: over gloo, rows on a GPU over NCCL."""
    import torch.distributed as dist

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def run_ranks(function, num_ranks, *args, timeout_s=120.0, may_die=()):
    """Run `function(rank, num_ranks, port, *args)` in `num_ranks` processes; returns the list of what they returned.

    `function` must be importable by name. Ranks in `may_die` may die or hang: their entry is None, and they
    are killed once all others are done. Raises RanksFailed if any other rank raises or dies, or after
    `timeout_s`; whatever happens, no child is left running.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":  # the server imports torch once for all ranks
        context.set_forkserver_preload(["torch", "torch.distributed", "dspark_mini.runtime"])
    ranks, results, done = {}, [None] * num_ranks, set()
    end = time.monotonic() + timeout_s
    try:
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(writer, function, rank, num_ranks, store.port, args))
            process.start()
            writer.close()
            ranks[reader] = (rank, process)
        must = set(range(num_ranks)) - set(may_die)
        while not must <= done:
            ready = wait([r for r, (rank, _) in ranks.items() if rank not in done], timeout=end - time.monotonic())
            if not ready:
                raise RanksFailed(f"ranks {sorted(must - done)} were not done after {timeout_s} s")
            for reader in ready:
                rank, process = ranks[reader]
                done.add(rank)
                try:
                    ok, value = reader.recv()
                except EOFError:
                    process.join(5)
                    store.set(f"dead/{rank}", "1")  # survivors need not wait for it
                    ok, value = None, f"died with exit code {process.exitcode}"
                if ok:
                    results[rank] = value
                elif rank not in may_die:
                    raise RanksFailed(f"rank {rank}: {value}")
        return results
    finally:
        for _, process in ranks.values():
            if process.is_alive():
                process.kill()  # SIGKILL also ends a stopped process
        for reader, (_, process) in ranks.items():
            process.join(10)
            reader.close()


def _child(writer, function, rank, num_ranks, port, args):
    try:
        import torch

        # Ranks of one machine meet on the loopback device, whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        torch.set_num_threads(1)  # ranks share this machine's cores
        writer.send((True, function(rank, num_ranks, port, *args)))
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
        try:
            writer.send((False, traceback.format_exc()))
        except OSError:
            pass
    finally:
        writer.close()
        sys.stdout.flush()
        os._exit(0)  # a destructor of a process group whose peers are gone can hang
