"""The on-disk kernel cache: bytes in, verified bytes out. cache_layout.md is its contract.

entry.py     entry.json and the checks on bytes; touches no file
tree.py      folders by descriptors: open, make, measure, remove; follows no link
index.py     which files a set of entries has; its digest is what a deployment pins
layer.py     one root as a reader sees it: what may be believed, and in which order that is found out
lock.py      locks with a bounded wait that says what it waits for
publish.py   stage, sync, rename; quarantine; sweep
survey.py    which entries a root has, when they were used, what cannot be looked into
evict.py     limits, least recently used first
outcome.py   what a look-up or a build gives, and counters
installed.py layers that were installed as Python packages
store.py     Cache: find a kernel in the layers or build it once
catalog.py   Catalog: list, verify, prune, clear
"""

from jitfp4.cache.catalog import Catalog, Checked, Entry, Size, Verdict
from jitfp4.cache.entry import Built, EntryFiles, Manifest
from jitfp4.cache.evict import Limits
from jitfp4.cache.index import Index
from jitfp4.cache.outcome import CacheInfo, Loaded, Miss, Missed
from jitfp4.cache.store import Cache
from jitfp4.cache.survey import Use

__all__ = [
    "Built",
    "Cache",
    "CacheInfo",
    "Catalog",
    "Checked",
    "Entry",
    "EntryFiles",
    "Index",
    "Limits",
    "Loaded",
    "Manifest",
    "Miss",
    "Missed",
    "Size",
    "Use",
    "Verdict",
]
