"""Guards of the deployment on Ray Serve that are broken one at a time."""

from __future__ import annotations

from .mutant import mutants

MUTANTS = [
    *mutants(
        "cluster",
        "cluster/test_arguments.py",
        (
            '            if name not in known:\n                raise FieldError(tables.unknown("argument"',
            '            if False:\n                raise FieldError(tables.unknown("argument"',
        ),
        ('        return read["value"] if len(read) == 1 else value', '        return read["value"]'),
        (
            '        if not arguments.name:\n            yield FieldError("missing: with address',
            '        if False:\n            yield FieldError("missing: with address',
        ),
        ("    if not arguments.model:\n        yield", "    if False:\n        yield"),
        (
            '        if getattr(arguments, key):\n            yield FieldError("it has no effect without',
            '        if False:\n            yield FieldError("it has no effect without',
        ),
        ("    if arguments.directory and not Path(arguments.directory).is_absolute():", "    if False:"),
        ("    if arguments.published and not arguments.name:", "    if False:"),
        ("        if is_given and not _DIGEST.fullmatch(value):", "        if is_given and False:"),
        (
            '        is_given = value or (key == "model" and arguments.model.startswith(PUBLISHED))',
            "        is_given = value",
        ),
        ('    if arguments.published and arguments.sha256 not in ("", arguments.published):', "    if False:"),
        ("        if getattr(model, each.name) != getattr(other, each.name):", "        if False:"),
        ("        cores = 1 if model.on_cards else workers * model.threads", "        cores = workers"),
        ("    most = max(_ONGOING_OF_WORKER * workers, _LEAST_ONGOING)", "    most = _ONGOING_OF_WORKER * workers"),
    ),
    *mutants(
        "cluster",
        "cluster/test_asgi.py",
        ("        named.popall(hdrs.AUTHORIZATION, None)\n", ""),
        ('raw.decode("latin-1").partition("?")[0]', 'raw.decode("latin-1")'),
        ("    for prefix in (root, quote(root)):", "    for prefix in (root,):"),
        (
            "            if not piece:\n                raise asyncio.IncompleteReadError",
            "            if False:\n                raise asyncio.IncompleteReadError",
        ),
        ('            if message["type"] != "http.request":', "            if False:"),
        ('            self._has_more = message.get("more_body", False)', "            self._has_more = False"),
        ("    content = () if method == hdrs.METH_HEAD else reply.content", "    content = reply.content"),
        ("(name.lower().encode(", "(name.encode("),
    ),
    *mutants(
        "cluster",
        "cluster/test_cache.py",
        ("            if found != sha256:", "            if False:"),
        ("            if _digest_of(place) != sha256:", "            if not place.exists():"),
        ("            shutil.rmtree(self._new, ignore_errors=True)\n            if", "            if"),
        ("            fcntl.flock(held, fcntl.LOCK_SH)\n", ""),
        ("        for each in unused[most:]:", "        for each in unused[most + 2:]:"),
        ("key=lambda each: each.stat().st_mtime, reverse=True)", "key=lambda each: each.stat().st_mtime)"),
        ("is_inside = path.parts and not path.is_absolute() and", "is_inside = path.parts and"),
        ('and ".." not in path.parts', "and True"),
        ("if not (is_inside and each.name.isprintable()", "if not (is_inside"),
    ),
    *mutants(
        "cluster",
        "cluster/test_rooms.py",
        (
            '        held = _open(path / "here")\n        fcntl.flock(held, fcntl.LOCK_EX)\n',
            '        held = _open(path / "here")\n',
        ),
        (
            "            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            shutil.rmtree(each",
            "            shutil.rmtree(each",
        ),
        ("        _sweep(rooms)\n", ""),
    ),
    *mutants(
        "cluster",
        "cluster/test_guard.py cluster/test_daemon.py",
        ("        if life >= _LONG_LIFE_S:", "        if False:"),
        ("min(2 * self._next, _MOST_PAUSE_S)", "2 * self._next"),
        ("            if status in _FOR_GOOD:", "            if False:"),
        ("                    os.kill(self._pid, signal.SIGKILL)", "                    pass"),
    ),
    *mutants(
        "cluster",
        "cluster/test_configuration.py",
        ("    if size > MOST_DIRECTORY_BYTES:", "    if False:"),
        ('.replace("\\x7f", "\\\\u007f")', ""),
        ('        "runtime_dir": str(directory),\n', ""),
        ('        "cache_dir": str(directory / "cache"),\n', ""),
    ),
    *mutants(
        "cluster",
        "cluster/test_replica.py",
        ("        if found != expected:\n", "        if False:\n"),
        (
            "        if not ready.ready:\n            raise Unavailable(ready.reason)",
            "        if False:\n            raise Unavailable(ready.reason)",
        ),
        ("        self._check()\n        return answer", "        return answer"),
        ("        for name, each in awaited.items():\n", "        for name, each in ():\n"),
    ),
]
