"""Eight writers that fill a cache far beyond its limit. Run inside the sandbox."""

from __future__ import annotations

from pathlib import Path

from jitfp4.cache import Cache
from jitfp4.cache.tree import disk_bytes
from jitfp4.config import Config
from tests.faults.crashes import open_store
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import end_child, start_child


def overfill(store: str, root: str, writers: int, limit: int, entry_bytes: int) -> dict[str, object]:
    """Ten times ``limit`` bytes of kernels from ``writers`` processes, while another reads; then one that writes alone,
    as much as makes it look after the limit.
    """
    folder = Path(root)
    each = 10 * limit // entry_bytes // writers
    config = Config(cache_dir=folder, cache_max_bytes=limit)

    def write(rank: int) -> None:
        cache = Cache(config) if store == "cache" else open_store(store, folder)
        for seed in range(rank * each, (rank + 1) * each):
            built = make_built(seed, size=entry_bytes)
            assert cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda built=built: built).cubin == built.cubin
        if isinstance(cache, Cache):
            assert not cache.info().store_errors, cache.info()

    children = [start_child(lambda rank=rank: write(rank)) for rank in range(writers)]
    reader = Cache(config)
    refused = 0
    for seed in range(0, writers * each, 3):
        found = reader.lookup(make_recipe(seed), TOOLCHAIN)
        refused += hasattr(found, "reason") and found.reason.value != "absent"
    failed = sum(end_child(child) != 0 for child in children)
    after_writers = disk_bytes(folder)[0]
    alone = Cache(config)
    for seed in range(10**6, 10**6 + limit // 32 // entry_bytes + 1):
        alone.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed, size=entry_bytes))
    return {"failed": failed, "refused": refused, "after writers": after_writers, "in the end": disk_bytes(folder)[0]}
