"""One copy of the weights for many processes, without help from the engine: sharing memory pages.

An engine that runs on the CPU reads a model file and keeps the weights, often rearranged, in memory of its
own. Four processes with the same model hold the same bytes four times. This package makes them hold them
once.

What an operating system gives
    A process does not see memory as it is. Its addresses are cut into *pages* of (mostly) 4096 bytes, and for
    each page the kernel keeps a note of where the bytes are: nowhere yet, in a piece of memory that belongs
    to this process, or in the kernel's copy of a part of a file. The last is a *mapping* of the file; it is
    made by the call ``mmap``. The copy exists once, however many processes map it. If the mapping is
    *private*, a process that writes to such a page gets its own copy of that page at that moment, and neither
    the file nor any other process sees the change ("copy on write"). ``mmap`` can also replace what is at an
    address already. All this goes unnoticed by the program: the same addresses, the same bytes. And pages of
    a file that nobody uses can leave memory, as they can be read from the file again.

What is done with it
    One process, the holder, builds the model and calls ``export_pages``: its pages go into a file, the page store,
    and are at once replaced by private mappings of that file. Each other process builds the same model from
    the same file and calls ``attach_pages``: it looks for each of its pages in the store, and replaces those that are
    there. What differs stays as it is. Then ``evict`` lets the pages that no process uses leave memory:
    engines leave much behind after loading. There is no role afterwards: the holder may die, and the store
    may be unlinked, and everything goes on.

Why that is safe, step by step
    1.  Only memory of which we know who writes to it, and when, is considered: large blocks of the C
        library's ``malloc``, from 1 MiB on, and from 128 KiB on if they came with the model. That is where weights
        are. Stacks, small objects, and the interpreter's own
        memory are elsewhere. How these blocks are told apart, and how that is checked against malloc's own
        count, is in ``chunks.py``. If the two do not agree in every byte, nothing is touched.
    2.  Pages are looked up by a hash, but a page is replaced only after it was compared with the store's page
        byte for byte, immediately before (``remap.py``). Wrong hashes, other models, and damaged stores share
        nothing; they do no harm.
    3.  Between that comparison and the replacement a write would be lost. So the engine must be idle, and no
        other thread may use, allocate or free large blocks: **that is the caller's promise**. What the
        interpreter itself writes meanwhile is not in the memory of point 1.
    4.  If the kernel refuses in between (no memory, no space, too many mappings), what was replaced stays
        replaced by equal pages, what was not stays, and ``PageSharingUnavailable`` says why. The model works in any
        case.
    5.  From then on each process can write to its pages without anybody noticing: the mappings are private.
    6.  A store is believed only if it is a regular file of the same user, used by nobody else, complete, and
        finished (``store.py``). It must not be written or truncated afterwards: processes read their weights
        from it, and one that reads beyond its end is killed (SIGBUS). So it is kept in a private directory,
        and ``export_pages`` leaves it without the permission to write.

It needs Linux on x86-64 or aarch64, and glibc. ``prepare`` is to be called before the engine is loaded.
Processes should run the engine with the same settings (as to threads, say), or it arranges the weights
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
