"""Storages as SGLang makes them: by its own factory, over its own host pools on the CPU."""

import time
from contextlib import ExitStack
from mmap import mmap
from uuid import uuid4

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.version import __version__

PAGE_SIZE = 16
LAYERS = 4
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
OPTIONS = {"page_size": PAGE_SIZE, "device": "cpu", "enable_memory_saver": False}
OLD = __version__.startswith("0.5.22")
WAIT_S = 60.0  # A machine under load may take its time; a hang takes longer.


def mha_pool(pages, layout="page_first", dtype=torch.bfloat16, layers=LAYERS):
    device = MHATokenToKVPool(head_num=2, head_dim=64, layer_num=layers, dtype=dtype, size=pages * PAGE_SIZE, **OPTIONS)
    return _host(MHATokenToKVPoolHost, device, "_mha_buffer_info", layout)


def mla_pool(pages, layout="page_first"):
    ranks = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
    device = MLATokenToKVPool(**ranks, layer_num=LAYERS, dtype=torch.bfloat16, size=pages * PAGE_SIZE, **OPTIONS)
    return _host(MLATokenToKVPoolHost, device, "_mla_buffer_info", layout, target_layer_num=LAYERS)


def _host(kind, device, buffer_info, layout, **more):
    if OLD:
        source, more = device, {}
    else:
        source = getattr(device, buffer_info)()
        more |= {"device_capacity_tokens": device.size, "start_layer": 0, "end_layer": device.layer_num}
    return filled(kind(source, 2.0, 0, PAGE_SIZE, layout, pin_memory=False, device="cpu", **more))


def filled(pool):
    whole = pool.kv_buffer.view(torch.uint8)
    whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8))
    return pool


def slots(pages):
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


def transfer(name, keys, pages=None, **more):
    return PoolTransfer(name, keys=keys, host_indices=slots(range(len(keys)) if pages is None else pages), **more)


def page_bytes(pool, page):
    return pool.get_data_page(page * PAGE_SIZE).contiguous().view(torch.uint8).numpy().tobytes()


def pages_of(pool, count):
    return [page_bytes(pool, page) for page in range(count)]


def new_keys(count):
    return [uuid4().hex + uuid4().hex for _ in range(count)]


def flip_a_bit(path, at):
    with path.open("r+b") as file, mmap(file.fileno(), 0) as content:
        content[at] ^= 1


def storage_config(**changed):
    ranks = {f"{axis}_{what}": int(what == "size") for axis in ("tp", "pp", "attn_cp") for what in ("rank", "size")}
    given = {"is_mla_model": False, "enable_storage_metrics": True, "is_page_first_layout": True, "model_name": "m"}
    return HiCacheStorageConfig(**ranks | given | changed)


def extra_config(root, **options):
    tier = {"type": "fs", "root": str(root), "capacity_bytes": "1GiB"}
    named = {"backend_name": "kvtier", "module_path": "kvtier.integrations.sglang", "class_name": "KVTierStorage"}
    return named | {"interface_v1": 1, "kvtier": {"secondary_tiers": [tier], "deadline_s": 20.0} | options}


def runner_pid(door):
    engine = getattr(door, "_backend", door)._pools["kv"].engine  # Without SGLang's fault injector.
    until = time.monotonic() + WAIT_S
    while (pid := engine._steps._bridge.pid) is None or not engine._ledger.runner_up:
        assert time.monotonic() < until
        engine.find([], until)  # Receives the message that a runner started.
        time.sleep(0.01)
    return pid


class Doors(ExitStack):
    def __init__(self, root):
        super().__init__()
        self.root = root

    def open(self, pool, options=None, **changed):
        extra = extra_config(self.root, **(options or {}))
        door = StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra, **changed), pool)
        self.callback(door.close)
        door.register_mem_pool_host(pool)
        return door
