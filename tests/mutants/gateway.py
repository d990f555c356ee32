"""Guards of the gateway, and of its HTTP, that are broken one at a time."""

from __future__ import annotations

from .mutant import mutants

MUTANTS = [
    *mutants(
        "gateway",
        "gateway/test_callers.py gateway/test_tokens.py gateway/test_seats.py",
        (
            '            if caller is None:\n                raise Unauthenticated("the token',
            '            if False:\n                raise Unauthenticated("the token',
        ),
        ("        caller = caller or self.anonymous", "        caller = self.anonymous or caller"),
        ('    if scheme.lower() != "bearer" or not token.strip():', "    if not token.strip():"),
        ("    if not _DIGEST.fullmatch(words[0]):", "    if False:"),
        ("        self._shares.give(self._caller, self._nbytes)", "        pass"),
    ),
    *mutants(
        "gateway",
        "gateway/config",
        ("            if not place.is_local:", "            if False:"),
        (
            "    if config.insecure or (config.tls_cert and (config.client_ca or not config.anonymous)):",
            "    if config.insecure or config.tls_cert:",
        ),
        ("    if config.shared_memory and others:", "    if False:"),
        ("            if uid == _HIDDEN_UID:", "            if False:"),
        ("        gateway = dataclasses.replace(gateway, http=tuple(listening) or gateway.http)", "        pass"),
    ),
    *mutants(
        "gateway",
        "gateway/test_arrays.py gateway/test_regions.py",
        (
            "    expected = math.prod(shape) * dtype.itemsize\n    if len(content) != expected:",
            "    expected = math.prod(shape) * dtype.itemsize\n    if False:",
        ),
        ("    if math.prod(dim for dim in checked if dim) > _MOST_ELEMENTS:", "    if False:"),
        ("    wrong = {*map(type, flat)} - _TYPES[dtype.kind]", "    wrong: set[type] = set()"),
        ('    if array.dtype.kind == "f" and not np.isfinite(array).all():', "    if False:"),
        ("found.st_uid != os.geteuid()", "False"),
        ("os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW", "os.O_RDWR | os.O_CLOEXEC"),
        (
            "            if not count:\n                raise InvalidArgument(",
            "            if not count:\n                return\n                raise InvalidArgument(",
        ),
        ("        if os.fstat(self._descriptor).st_size < self.offset + offset + len(content):", "        if False:"),
        ("        if first + size > region.nbytes:", "        if False:"),
    ),
    *mutants(
        "gateway",
        "gateway/rest/test_form.py gateway/rest/test_routes.py gateway/rest/test_connection.py",
        ("    if len(header) > MOST_JSON_BYTES:", "    if False:"),
        ('    if sum(map(text.count, (b",", b"[", b"{"))) > arrays.MOST_VALUES:', "    if False:"),
        ("parse_constant=_no_constant", "parse_constant=float"),
        ("    if begin != len(content):", "    if False:"),
        ("    unknown = content.keys() - _FIELDS", "    unknown: set[str] = set()"),
        ("        if rest[1] != VERSION:", "        if False:"),
        (
            "going = next((each for each in self._idle if largest in (None, each.peer.key)), connection)",
            "going = connection",
        ),
        ("largest = key if count > max(1, self._most // _RESERVED) else None", "largest = key"),
        ("            if going is connection:", "            if False:"),
        (" and each.since < limit and", " and"),
        ("        elif phase is not Phase.HEADER:\n", "        else:\n"),
        ("            self.goes(going)\n", ""),
        ("            if limit is not None and now > each.since + limit:", "            if False:"),
    ),
    *mutants(
        "gateway",
        "gateway/rest/test_api.py",
        ("    if length is not None and length > most:", "    if False:"),
        ("                seat.take(each.size)\n", ""),
        ("        seat.take(each.size)\n        content", "        content"),
        ("        if len(body) + len(chunk) > most:", "        if False:"),
        ("    if inflater is not None and not inflater.eof:", "    if False:"),
        ("        if inflater.unused_data:", "        if False:"),
        ("    if encoding not in ENCODINGS:", "    if False:"),
        ("    if host in hosts or ANY_HOST in hosts", "    if True"),
        ("            if verb not in _OPEN:", "            if False:"),
        ("handler_cancellation=True", "handler_cancellation=False"),
        ("    if length > len(content):", "    if False:"),
        ('    return given if given and _FORM.fullmatch(given) else ""', "    return given"),
        ("            if len(content) > place.nbytes:", "            if False:"),
    ),
    *mutants(
        "gateway",
        "gateway/rest/test_hostile.py",
        ("                resp.release()\n", "                pass\n"),
        (
            "        kept = self._service.seats.keep(caller, len(described) + sum(map(len, pieces)))",
            "        kept = self._service.seats.keep(caller, 0)",
        ),
    ),
    *mutants(
        "gateway",
        "gateway/test_shares.py",
        ("        if free < 0:\n            return False", ""),
        ("            if has > own and has + count > _TIMES_FREE * free:", "            if False:"),
        (
            "            if has > own and has + count > _TIMES_FREE * free:",
            "            if has + count > _TIMES_FREE * free:",
        ),
        ("            self._of[who] -= count", "            pass"),
    ),
    *mutants(
        "gateway",
        "gateway/test_service.py",
        ("            if time.monotonic() - self._at > _FRESH_S:", "            if True:"),
        ("        wanted = told(error)", "        wanted: Any = error"),
        ("timeout=self._timeout, tenant=caller.tenant", "timeout=self._timeout, tenant=None"),
    ),
]
