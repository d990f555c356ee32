"""Which batches are long: an estimate for each tenant from measured times, and the tenants that use a model.

A batch that runs cannot be stopped. A batch that takes much longer than those of the other tenants therefore must not
take the last worker of a model: see `Scheduler`. Nothing is measured while only one tenant sends requests.
"""

from __future__ import annotations

from weightd_daemon.tenants.tenant import Tenant

# A tenant is active for so many seconds after each of its requests. One that sends a request now and then would
# otherwise find all workers taken whenever it does.
ACTIVE_S = 60.0

# A batch is long if it takes more than this many times as long as a batch of another tenant.
_LONG_FACTOR = 2.0

# A measured time is replaced by a shorter one only after this many times its own length. A tenant that sends short
# requests for a while to hide a long one so gets at most a hundredth of the time in this way.
_RETENTION_FACTOR = 100.0

# The weight of the latest batch in the mean of a tenant.
_WEIGHT = 0.2

_Measurements = tuple[tuple[float, float], ...]
"""Up to two times in seconds, the longer one last, each with when it was measured."""


class Durations:
    """Times of the batches of one model, for each tenant and for sizes of requests within a factor of two.

    There are separate times for each tenant because the time may depend on the values of the inputs: what one tenant
    sends says nothing about the requests of another.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[Tenant, dict[int, tuple[int, _Measurements]]] = {}

    def add(self, tenant: Tenant, nbytes: int, seconds: float, now: float) -> None:
        """Add the time of a batch with one request, whose input tensors have `nbytes` bytes."""
        sizes = self._by_tenant.setdefault(tenant, {})
        _, measured = sizes.get(nbytes.bit_length(), (0, ()))
        kept = [each for each in measured if now < each[1] + _RETENTION_FACTOR * each[0]]
        sizes[nbytes.bit_length()] = nbytes, tuple(sorted([*kept, (seconds, now)])[-2:])

    def expected_s(self, tenant: Tenant, nbytes: int) -> float:
        """Return how many seconds a request of this size is expected to take; 0.0 if nothing is known.

        That is the second longest time lately, because the longest one may have had another cause. For a size that was
        not measured, the time of the nearest size is scaled in proportion.
        """
        sizes = self._by_tenant.get(tenant)
        if not sizes:
            return 0.0
        bucket = nbytes.bit_length()
        size, measured = sizes.get(bucket) or sizes[min(sizes, key=lambda each: (abs(each - bucket), each))]
        seconds = measured[0][0]
        return seconds if size.bit_length() == bucket else seconds * nbytes / max(1, size)

    def longest_s(self, tenant: Tenant) -> float:
        """Return the longest time that is expected of a size that was measured; 0.0 if none was."""
        return max((measured[0][0] for _, measured in self._by_tenant.get(tenant, {}).values()), default=0.0)


class _User:
    __slots__ = ("last_request_at", "long_ended_at", "long_s", "mean_s")

    def __init__(self) -> None:
        self.last_request_at = -float("inf")
        self.mean_s = 0.0
        self.long_s = 0.0
        self.long_ended_at = -float("inf")


class Users:
    """The tenants that use the workers of a model, or of several models that share their processes."""

    def __init__(self) -> None:
        self._users: dict[Tenant, _User] = {}

    def on_request(self, tenant: Tenant, now: float) -> None:
        """Record that a tenant has sent a request."""
        self._user_of(tenant).last_request_at = now

    def add_time(self, tenant: Tenant, seconds: float) -> None:
        """Record the time of a batch with one request of a tenant."""
        user = self._user_of(tenant)
        user.mean_s += (_WEIGHT if user.mean_s else 1.0) * (seconds - user.mean_s)

    def long_threshold_s(self, tenant: Tenant, min_s: float, now: float) -> float:
        """Return the time in seconds beyond which a batch of a tenant is long.

        Infinity while no other tenant is active.

        Args:
            tenant: of the batch.
            min_s: no batch that takes less is long.
            now: monotonic seconds.
        """
        means = [self._users[each].mean_s for each in self._other_active_tenants(tenant, now)]
        return max(min_s, _LONG_FACTOR * min(means)) if means else float("inf")

    def add_long_time(self, tenant: Tenant, seconds: float, now: float) -> None:
        """Record that a long batch of a tenant has held the only worker."""
        user = self._user_of(tenant)
        user.long_s, user.long_ended_at = seconds, now

    def long_allowed_at(self, tenant: Tenant, now: float) -> float:
        """Return until when no long batch of a tenant may take the only worker again.

        The other tenants have it for as long as their weights give them, compared with the last long batch.
        """
        user, weights = (
            self._user_of(tenant),
            sum(each.config.weight for each in self._other_active_tenants(tenant, now)),
        )
        return user.long_ended_at + user.long_s * weights / tenant.config.weight

    def active_until(self, tenant: Tenant, now: float) -> float:
        """Return until when another tenant than this one is active, if none sends another request."""
        return max(
            (self._users[each].last_request_at + ACTIVE_S for each in self._other_active_tenants(tenant, now)),
            default=now,
        )

    def _user_of(self, tenant: Tenant) -> _User:
        user = self._users.get(tenant)
        if user is None:
            user = self._users[tenant] = _User()
        return user

    def _other_active_tenants(self, tenant: Tenant, now: float) -> list[Tenant]:
        return [
            each for each, user in self._users.items() if each is not tenant and now < user.last_request_at + ACTIVE_S
        ]
