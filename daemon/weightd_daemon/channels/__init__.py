"""Direct channels: requests go from the client to a worker, and answers back, without the daemon on their way.

The daemon grants channels, ends them and watches the workers. The parts that decide do no I/O, and
`tests/daemon/channels` runs them as one model over simulated sockets.

Parts that decide
-----------------

======================================== =============================================================================
`states`, `table`                        the state of each channel; grants, credits, ends, exits of workers
`page`                                   writes the daemon's page of a device
`rows`                                   reads the workers' rows, which may contain anything
`packets`                                parses packets that no worker has run
`exclusions`                             tenants and users that have no channels to a model for some time
`weightd_common.channels.pages`          layout of the pages
`weightd_common.channels.messages`       messages between daemon, clients and workers, as values
`weightd_worker.channels.pull_scheduler` the channel that a worker reads next; charges to tenants
`weightd_worker.channels.row`            writes the worker's row
`weightd_worker.channels.session`        the life of a request in a worker
`weightd_worker.channels.requests`       parses requests; the descriptions that a worker may run
`weightd_worker.channels.answers`        writes answers
`weightd_worker.channels.weight_guard`   checks that the worker's shared weights are still valid
`weightd.channels.requests`              when a client asks for a channel
`weightd.channels.calls`                 the client's calls: channel or daemon, and the end of each call
======================================== =============================================================================

Parts with I/O
--------------

======================================== =============================================================================
`device`                                 the memory of a device's pages; its workers and tenants
`sockets`                                executes the actions of `table`
`service`                                opens channels, extends and ends them; finds hung workers
`weightd_daemon.api.channels`            handles `open_channel`; dispatches requests that no worker has run
`weightd_worker.channels.direct`         reads the channels of a worker, and sends answers
`weightd_worker.channels.mapped_pages`   maps the pages into a worker
`weightd.channels.sockets`               the client's ends
`weightd_protocol.messages.channels`     the messages on the wire
======================================== =============================================================================

A channel is one `SOCK_SEQPACKET` pair, for one client, tenant, model and generation. The client holds one end. All
workers of the generation and the daemon hold duplicates of the other end, so each request is read by exactly one of
them, and requests outlive workers. Clients map no page.

The rows of all workers of a device, of all its models, form one account. A row outlives its worker: the next worker
continues it after `RowReader.repair`. So no sum ever falls, and an exit gives no tenant credit.

Writers
-------

============================ ==================== =======================================================
weight, offset of a tenant   daemon               at a grant of the slot, a reload, a quota
slot of a channel            daemon               `open_channel` writes the state last; `free_channel` only
                                                  after every worker has released the channel
limits, expiry               daemon               before the client gets them, so a client that obeys its
                                                  limits is never refused
row                          its worker           in the order below; after the exit, the daemon repairs it
============================ ==================== =======================================================

Life of a request
-----------------

1. The client has credits, and the daemon has answered a request with the same description since it has opened the
   channel: the client sends the request on the channel. Otherwise, and if sending fails, it sends the request to the
   daemon, which relays it. Before the daemon answers the first request with a description, it allows the workers to
   run further ones.
2. Each idle worker polls all its channels, level-triggered and without EPOLLEXCLUSIVE. It chooses one and charges the
   expected cost, stores the channel and TAKING, and reads one message without waiting. If another worker was quicker,
   it takes the charge back.
3. It stores the request's number and counts, then TAKEN. If only one channel was readable, it charges the expected cost
   now. It compares the counts with the limits, which includes the counts of workers that took a request at the same
   time.
4. If the request must not run (limits, expiry, end of the channel, unknown description, invalid packet), the worker
   stores HANDING_OVER and sends the request to the daemon. The daemon notifies the client by `Adopted` and relays the
   request. If the connection has no room for it, because the daemon does not read, the client gets an error instead.
5. Otherwise the worker stores the start and RUNNING, and runs the predict. A late request gets an error instead, and
   does not run. A request that does not run costs its tenant a small fixed time.
6. If the shared weights have become invalid meanwhile, it exits without an answer. Otherwise it stores the measured
   cost and sends the answer. If the answer is too large for a packet, it hands the request over,
   which runs again. If the channel is full, it sends `AnswerDropped` to the daemon instead. It counts the end and
   stores IDLE.

Exit of a worker between any two operations
-------------------------------------------

The daemon reads all messages of the worker, then its row. The client reads the channel before it applies a notice,
because answers may be in its queue.

============================================ ========== ===============================================================
the worker exits after                       stage      consequence
============================================ ========== ===============================================================
storing base, charge or channel              IDLE       none; the request is still in the queue
storing TAKING                               TAKING     as the next line: the daemon cannot know whether it was read
reading the message, storing the number,     TAKING     the channel is revoked; at its end the client sends each request
counting the request or its bytes                       without an answer again: none of them has run
storing TAKEN, HANDING_OVER, the start;      TAKEN,     `Lost`, not run
sending a part of the request                HANDING..
sending the whole request to the daemon      HANDING..  the daemon has adopted it; the client ignores `Lost`
storing RUNNING, running, storing the cost   RUNNING    `Lost`, may have run; the loss counts against the client
sending the answer, counting the end         RUNNING    the client has read the answer, and ignores `Lost`
sending `AnswerDropped`                      RUNNING    `Lost`, may have run, twice; the second is ignored
answering a late request                     TAKEN      the client has read the answer, and ignores `Lost`
storing IDLE                                 IDLE       none
============================================ ========== ===============================================================

After `Lost`, the client sends the request again, to the daemon, even if it may have run. It does not get to know
whether it has. If the request was running when the worker crashed, the daemon treats the second one as a second
attempt, and runs it alone.

In every line before RUNNING, credits may be lost for the client, never gained, and the expected cost may stay charged.
A row that is implausible says nothing: the daemon revokes all channels of the worker, and their requests without an
answer may have run. A worker with corrupted memory may write a plausible lie: it harms the clients of its generation's
channels, and the shares of other tenants on the device. These rules limit stray writes, not attackers: a worker runs as
the user of the daemon, so code of an attacker in a worker can do what the daemon can.

Exit of the daemon: clients and workers go on until the channel expires. The next daemon has no duplicates.
Each worker that connects to it calls `shutdown(SHUT_RD)` on its descriptors, answers the queue under the earlier page,
and closes the channels. A client that reads the end of such a channel fails the rest: it may have run. A request that
the worker would hand over from such a channel gets an error, because the next daemon does not know the client.

Exit of the daemon between two stores to its page: the page has no group of words that must agree. A channel whose state
is not stored is not open yet; a limit that is not stored gives no credit; a weight without its offset costs the tenant
at most the virtual seconds that it was ahead.

Exit of the client: the queue stays readable. The daemon sees the end of the client's connection (ABANDONED), and the
workers stop reading.

End of a channel
----------------

The daemon calls `shutdown(SHUT_RD)` on its duplicate: the client's next send fails with EPIPE, queued requests stay
readable, answers still arrive. REVOKED: workers answer the queue to its end. A worker reads the end in the tenant's
turn, which may be far away; so the daemon also looks at the queue (SIOCINQ), and reclaims it when it is empty.
RECLAIMED: the page tells workers to stop, and the daemon reads the queue and relays it under the ordinary admission
rules. The daemon reads the rest of every queue once more after the last release (DRAINED), because a client can send an
empty message, which workers take for the end. Only then it sends `Ended`, closes its duplicate and frees the slot. So
no worker answers on a channel whose end was confirmed.

A worker stops reading a channel on its own if the channel has expired, is overdrawn, or seems to have ended. It reports
`Released`, and the daemon reclaims the channel: otherwise a channel that stays readable would keep the worker awake.
"""
