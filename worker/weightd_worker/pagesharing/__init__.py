"""Sharing of memory pages: many processes hold one copy of a model's weights, without help from the engine.

An engine that runs on the CPU reads a model file and keeps the weights, often rearranged, in private memory. Four
processes with the same model hold the same bytes four times. With this package they hold them once.

Memory mappings of the operating system
    The address space of a process is divided into *pages* of (mostly) 4096 bytes. For each page the kernel records
    where its bytes are: nowhere yet, in memory that belongs to this process, or in the kernel's copy of a part of a
    file. The last is a *mapping* of the file, made by the call ``mmap``. The copy exists once, however many processes
    map it. If the mapping is *private*, a process that writes to such a page gets a private copy of the page at that
    moment, and neither the file nor any other process sees the change ("copy on write"). ``mmap`` can also replace the
    memory at an address that is in use. The program does not notice: the same addresses hold the same bytes. Pages of a
    file that no process uses can leave memory, because they can be read from the file again.

How this package uses them
    One process, the holder, builds the model and calls ``export_pages``, which writes its pages to a file, the page
    store, and at once replaces them by private mappings of that file. Each other process builds the same model from the
    same file and calls ``attach_pages``, which looks for each of its pages in the store, and replaces the pages that
    it finds. Other pages stay as they are. Then ``evict`` lets the pages that no process uses leave memory: engines
    leave many of them behind after loading. Afterwards no process depends on another: the holder may exit, the store
    may be unlinked, and the others go on.

Why this is safe
    1.  The package considers only memory whose writers are known: large blocks of the C library's ``malloc``, from
        1 MiB on, and from 128 KiB on if they were allocated by the build. Weights are in such blocks. Stacks, small
        objects and the interpreter's memory are not. ``chunks.py`` describes how the blocks are found, and how the
        result is checked against malloc's counters. If the two differ by a byte, no page is replaced.
    2.  Pages are looked up by a hash, but a page is replaced only after it was compared with the store's page byte for
        byte, immediately before (``remap.py``). With wrong hashes, another model or a damaged store, nothing is shared,
        and no harm is done.
    3.  A write between that comparison and the replacement would be lost. So **the caller guarantees** that the engine
        is idle, and that no other thread uses, allocates or frees large blocks. The interpreter itself writes only to
        other memory than the blocks of point 1.
    4.  If the kernel refuses an operation (no memory, no space, too many mappings), replaced pages stay replaced by
        equal ones, the others stay as they were, and ``PageSharingUnavailable`` has the reason. The model works in any
        case.
    5.  From then on each process can write to its pages without an effect on others, because the mappings are private.
    6.  A store is accepted only if it is a regular file that only the same user can access, complete and finished
        (``store.py``). It must not be written or truncated afterwards: processes read their weights from it, and a read
        beyond its end kills them (SIGBUS). So it is kept in a private directory, and ``export_pages`` removes the
        permission to write.

The package needs Linux on x86-64 or aarch64, and glibc. ``prepare`` has to be called before the engine is loaded. All
processes should run the engine with the same settings (such as threads), because otherwise it arranges the weights
differently.

::

    prepare(); starts = start_build(); build the model; export_pages(path, starts)    # the holder
    prepare(); starts = start_build(); build the model; attach_pages(path, starts)    # each worker; then evict(path)
"""

from .chunks import MIN_BLOCK_BYTES, MappingStarts
from .libc import PageSharingUnavailable
from .sharing import (
    PageSharingResult,
    attach_pages,
    export_pages,
    mmap_threshold_bytes,
    prepare,
    restore_mmap_threshold,
    start_build,
)
from .store import evict, is_on_disk, prefetch, resident_bytes

__all__ = [
    "MIN_BLOCK_BYTES",
    "MappingStarts",
    "PageSharingResult",
    "PageSharingUnavailable",
    "attach_pages",
    "evict",
    "export_pages",
    "is_on_disk",
    "mmap_threshold_bytes",
    "prefetch",
    "prepare",
    "resident_bytes",
    "restore_mmap_threshold",
    "start_build",
]
