"""Checks of a rank with a GPU: its cores and their NUMA node, network cards, and the precision of products.

Run on one H100; tests use stand-ins for torch.cuda and a made-up /sys.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import torch

from dist_mem.runtime import devices, gpu
from dist_mem.runtime.distributed import World
from dist_mem.runtime.gpu import gpu_place, numa_node
from dist_mem.supervision.findings import Remark, fail, ok, warning

_GOOD_CORES = 4  # of a rank: the training, NCCL's thread, prefetch, saver


def check_gpu(world: World, *, tf32: bool) -> Iterator[Remark]:
    """Run the checks of a rank; nothing without a GPU. Every rank calls this. `tf32`: as `train.tf32`."""
    if world.device.type != "cuda":
        return
    yield _check_cores(world.device)
    if world.size > world.local_size:
        yield from _check_network_cards(world.device)
    yield _check_tf32(wanted=tf32)


def _check_cores(device: torch.device) -> Remark:
    place, cores = gpu_place(device.index), os.sched_getaffinity(0)
    near = place.cores & cores
    where = f"{len(cores)} cores"
    if place.cores and not near:
        text = f"{where}, none of them next to its GPU (NUMA node {place.node})"
        return warning("cores", text, "launch.cpu_bind=none, so that a rank can bind itself; --exclusive")
    if len(cores) < _GOOD_CORES:
        fix = "launch.cpus_per_task, or --exclusive; srun alone: --cpus-per-task"
        return warning("cores", f"{where} for the training, NCCL, prefetch and saver", fix)
    if place.cores and len(near) < len(cores):
        return warning("cores", f"{where}, {len(near)} of them next to its GPU", "train.numa_binding=true")
    node = "" if place.node is None else f" (NUMA node {place.node})"
    return ok("cores", f"{where} next to the GPU{node}" if place.cores else where)


def _check_network_cards(device: torch.device) -> Iterator[Remark]:
    """Check the interfaces that NCCL and gloo are bound to, and InfiniBand's cards; NCCL chooses those itself."""
    present = {name for _, name in socket.if_nameindex()}
    for name in devices.socket_interfaces():
        if not any(one.startswith(name) for one in present):  # NCCL takes a prefix
            text = f"{name} is not there; there are {', '.join(sorted(present))}"
            yield fail("network card", text, "launch.interface, or NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME")
    states = {port.parent.parent: _is_active(port) for port in (gpu.SYS / "class/infiniband").glob("*/ports/*")}
    active = sorted(card for card, is_active in states.items() if is_active)
    silent = sorted(card.name for card in states if card not in active)
    if active and silent:
        text = f"{', '.join(silent)} has no link, {', '.join(card.name for card in active)} has"
        yield warning("network card", text, "ibstat; NCCL_IB_HCA names those to use (launch.env)")
    elif active:
        node = gpu_place(device.index).node
        near = [card.name for card in active if numa_node(card / "device") == node]
        yield ok("network card", f"{', '.join(near) or 'none'} of {len(active)} next to the GPU")
    elif not states:
        yield warning(
            "network card", "no InfiniBand or RoCE: NCCL takes TCP", "fine for a small job; else ask the site"
        )


def _is_active(port: Path) -> bool:
    return "ACTIVE" in (port / "state").read_text(encoding="ascii")  # as "4: ACTIVE"


def _check_tf32(*, wanted: bool) -> Remark:
    if devices.tf32_is_forced() and not wanted:
        text = "NVIDIA_TF32_OVERRIDE=1: no product of float32 is exact, also none of memories"
        return fail("float32", text, "unset it; train.tf32 allows it where it does no harm")
    return ok("float32", "products in TF32" if torch.backends.cuda.matmul.allow_tf32 else "products are exact")
