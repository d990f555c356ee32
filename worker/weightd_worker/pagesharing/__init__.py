"""Sharing of memory pages: several processes share one copy of a model's weights, without support by the engine.

An engine that runs on the CPU reads a model file and keeps the weights, often rearranged, in private memory. So four
processes with the same model have the same bytes in memory four times. With this package, the bytes are in memory once.

Memory mappings of the operating system
    The address space of a process is divided into *pages* of (mostly) 4096 bytes. For each page the kernel records
    where its bytes are: nowhere yet, in memory that only this process has, or in the kernel's copy of a part of a file.
    In the third case the page is part of a *mapping* of the file, which the process has made by the call ``mmap``. The
    kernel's copy exists only once, however many processes map the file. If the mapping is *private* and a process
    writes to a page, the kernel first makes a private copy of the page for this process, so that neither the file nor
    another process is changed ("copy on write"). ``mmap`` can also replace memory that is in use by a mapping of a file
    with the same bytes. The program does not notice the replacement, because all addresses stay the same. If no process
    uses a page of a file, the kernel can free the memory of the page, because it can read the page from the file again.

How this package uses them
    One process, the holder, builds the model and calls ``export_pages``. This function writes the pages of the holder
    to a file, the page store, and replaces the pages at once by private mappings of the store. Each worker builds the
    same model from the same model file and calls ``attach_pages``. This function looks for each page of the worker in
    the store, and replaces the pages that it finds by mappings of the store. All other pages stay private. Then
    ``evict`` frees the memory of the store's pages that no process uses; engines leave many such pages behind after
    loading. Afterwards no process depends on another: the holder may exit, and the store's file may be removed.

Why this is safe
    1.  The package replaces only large blocks of the C library's ``malloc``: blocks of at least 1 MiB, or of at least
        128 KiB if the build has allocated them. Weights are in such blocks, whereas stacks, small objects and the
        interpreter's memory are not. ``chunks.py`` describes how the package finds the blocks, and how it checks their
        number and size by malloc's counters. If the sizes differ by a single byte, no page is replaced.
    2.  Pages are found by a hash, but immediately before a page is replaced, it is compared byte for byte with the
        store's page (``remap.py``). So wrong hashes, a store of another model or a damaged store do no harm: the pages
        are only not shared.
    3.  A write between this comparison and the replacement would be lost. So **the caller guarantees** that the engine
        is idle, and that no other thread uses, allocates or frees large blocks. The interpreter itself does not write
        to the blocks of point 1.
    4.  If the kernel refuses an operation (no memory, no disk space, too many mappings), ``PageSharingUnavailable`` is
        raised with the reason. Pages that are already replaced have the same bytes as before, and the other pages stay
        private, so the model works in any case.
    5.  After the replacement, a process can write to its pages without changing pages of another process, because the
        mappings are private.
    6.  A store is accepted only if it is a complete regular file that only the same user can access (``store.py``). The
        store must not be changed or truncated afterwards: processes read their weights from the store, and a process
        that reads beyond its end is killed by SIGBUS. So the store is in a private directory, and ``export_pages``
        removes the write permission.

The package requires Linux on x86-64 or aarch64, and glibc. Call ``prepare`` before the engine is loaded. All processes
should use the same settings of the engine (such as the number of threads), because otherwise the engine arranges the
weights differently and fewer pages are equal.

::

    prepare(); starts = start_build(); build the model; export_pages(path, starts)    # the holder
    prepare(); starts = start_build(); build the model; attach_pages(path, starts)    # each worker; then evict(path)
"""

from .chunks import MIN_BLOCK_BYTES, MappingStarts
from .libc import PageSharingUnavailable
from .sharing import (
    MAX_MMAP_THRESHOLD_BYTES,
    PageSharingResult,
    attach_pages,
    export_pages,
    keep_blocks_in_heap,
    mmap_threshold_bytes,
    prepare,
    prepare_fork,
    restore_mmap_threshold,
    start_build,
)
from .store import evict, is_on_disk, prefetch, resident_bytes

__all__ = [
    "MAX_MMAP_THRESHOLD_BYTES",
    "MIN_BLOCK_BYTES",
    "MappingStarts",
    "PageSharingResult",
    "PageSharingUnavailable",
    "attach_pages",
    "evict",
    "export_pages",
    "is_on_disk",
    "keep_blocks_in_heap",
    "mmap_threshold_bytes",
    "prefetch",
    "prepare",
    "prepare_fork",
    "resident_bytes",
    "restore_mmap_threshold",
    "start_build",
]
