"""The on-disk kernel cache: bytes in, verified bytes out. cache_layout.md is its contract.

entry.py     entry.json and the checks on bytes; touches no file
tree.py      folders by descriptors: open, make, measure, remove; follows no link
index.py     which files a set of entries has; the digest of the index is what a deployment pins
layer.py     one root for reading: the checks of a load, in their order
lock.py      locks with a bounded wait; the log says who holds the lock
publish.py   write an entry, quarantine a bad one, sweep what killed processes left
survey.py    which entries a root has, when they were used, and which folders cannot be read
evict.py     remove the least recently used entries when a limit is exceeded
outcome.py   results of a look-up or a build, and counters
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
