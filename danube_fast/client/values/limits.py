"""Every bound of the client, with its unit and its reason.

What a user tunes is an argument of `connect()`, `producer()` or `consumer()`; the defaults stand
here too.
"""

from __future__ import annotations

from danube_fast.clock import MILLISECOND_NS, SECOND_NS
from danube_fast.frame.layout import FRAME_BYTES_CAP

FOREVER_NS = 1 << 62
"""A deadline that never comes."""

SLICE_NS = 100 * MILLISECOND_NS
"""Longest uninterrupted sleep of a waiting caller, so that Ctrl-C is always answered."""
LOOK_NS = 10 * SLICE_NS
"""How often a caller that waits for messages looks whether some have come, if it is not woken."""

SPIN_US_MAX = 10_000

# timeouts
CONNECT_TIMEOUT_SECONDS = 10.0
REQUEST_TIMEOUT_SECONDS = 30.0
SEND_TIMEOUT_SECONDS = 30.0
CLOSE_TIMEOUT_SECONDS = 5.0
HANDSHAKE_RETRY_NS = 1 * SECOND_NS
HANDSHAKE_RETRY_NS_MAX = 4 * SECOND_NS
"""An unanswered HELLO is repeated on a fresh socket after this time, doubled each time."""
HANDSHAKE_LOOK_NS = 50 * MILLISECOND_NS
"""How often the monitor of a CURVE handshake is read."""
HANDSHAKE_VERDICT_NS = 2 * SECOND_NS
"""Handshakes that fail for so long will not succeed: a broker that restarts is either absent or back before."""
HANDSHAKE_PAUSE_NS = 100 * MILLISECOND_NS
HANDSHAKE_PAUSE_NS_MAX = 400 * MILLISECOND_NS
"""Pause behind a handshake that has failed, with each key in turn if there are several; doubled each time. A broker
holds off the whole address of clients that fail too often."""
LOOKUP_AFTER_NS = 1 * SECOND_NS
"""A worker that stayed away this long may have moved: its topics are looked up again."""
TAKEOVER_NS = 5 * SECOND_NS
"""How long a reconnecting client may be refused by a limit, or by what may be its own old session."""
WAIT_TOLD_NS = 2 * SECOND_NS
"""What is refused for the moment for so long is told in the log, with the reason."""
REPAIR_NS = 500 * MILLISECOND_NS
"""How long a first open asks again that a failed sync undid: the log goes on in a new segment."""
THROTTLE_MAX_NS = 1 * SECOND_NS
"""A rate may be raised meanwhile: the broker is asked again so often."""
LOOKUPS_MAX = 256
"""Topics of a pattern that are looked up at the same time."""
WATCH_WAIT_NS = 4 * SECOND_NS
"""How long the broker holds a WATCH back if nothing changes."""
WATCH_PROBE_NS = WATCH_WAIT_NS + 1 * SECOND_NS
"""An answer that takes longer may never come: the coordinator may be a new one."""
RINGS_RETRY_NS = 20 * MILLISECOND_NS
"""How often a connection without a port asks for rings."""
RINGS_WAIT_NS = 30 * SECOND_NS
"""A connection that had rings waits so long for new ones before it takes a socket: a worker that has
none to give says so at once, so silence means that it is not up yet."""
BACKOFF_MIN_NS = 20 * MILLISECOND_NS
BACKOFF_MAX_NS = 1 * SECOND_NS

# publishing
BATCH_BYTES_DEFAULT = BATCH_BYTES_MAX = FRAME_BYTES_CAP
"""Frames of several messages are never larger; one message alone may be."""
BATCH_BYTES_MIN = 4096
"""Least that an application, or a rate, may make of that."""
BATCH_MESSAGES_MAX = 65_536
"""Bounds the Python objects that wait in an open batch of tiny messages."""
MESSAGE_OVERHEAD_BYTES = 8
"""Bytes of one message in a frame beside its payload, for the estimate of an open batch."""
LINGER_US_DEFAULT = 200
WINDOW_BYTES_DEFAULT = 16 * 1024 * 1024
FRAMES_IN_FLIGHT_MAX = 64
"""Per producer and partition: as many batches as the broker remembers, so that republishing after
a lost connection always gets the original offsets."""
MESSAGE_BYTES_MAX_DEFAULT = 16 * 1024 * 1024
PRODUCERS_CACHED_MAX = 1024
"""Producers that `client.publish` keeps open; the one used longest ago is closed first."""
REPLIERS_MAX = 256
"""Producers kept open on the reply topics of others, likewise."""
BUSY_BUNDLES = 2
"""From so many unanswered bundles of one ack class on, open batches wait for an answer: one is being synced, one is
being read."""
BUSY_FRAMES = 16
"""One unanswered bundle of so many frames has the same effect."""
GATHER_NS_PER_FRAME = 80_000
"""Batches that wait for an answer are gathered so long for each frame on the way. A small one costs client, worker and
consumer about 50 us together, so frames with few messages do not take all processors."""
GATHER_NS_MAX = 50 * MILLISECOND_NS
"""The longest time that batches are gathered, however many frames are on the way."""
BUNDLE_BYTES_MAX = 1024 * 1024
"""Frames of many partitions that go out together; more make another bundle, or fewer where the broker's
own limit is smaller."""
CLIENT_WINDOW_BYTES = 64 * 1024 * 1024
"""Unacked bytes of all producers of a client together."""
DRAIN_NS = 200 * 1000
"""A busy sender looks for answers once in this time."""
ANSWER_TICK_NS = 2 * MILLISECOND_NS
"""How often the timer thread looks for an answer that open batches wait for."""
ACK_TICK_NS = 20 * MILLISECOND_NS
"""How often the timer thread looks for acks when no other thread reads the sockets."""

# consuming
PERMITS_BYTES_DEFAULT = 16 * 1024 * 1024
PERMITS_MESSAGES_DEFAULT = 262_144
PREFETCH_PER_HANDLER = 64
"""Messages that `client.subscribe` has sent ahead for each handler: enough for quick ones, and few that
wait behind a slow one while another process has nothing to do."""
CREDIT_PARTS = 4
"""Credit goes back in steps of the window divided by this."""
SMALL_FRAMES_MIN = 16
"""Credit of a frame goes back when all of it was taken, if the window holds so many of its size."""
ACK_DELAY_NS = 40 * MILLISECOND_NS
"""Longest time that an ack waits for others to be sent with it. Each ACK costs the worker a turn, and its sync another
one, which delay messages that arrive meanwhile."""
ACK_EARLY_NS = 32 * MILLISECOND_NS
"""A receive that is about to wait sends acks that have gathered for so long. Right behind a message is the best moment:
the next one of a steady stream is still to come, and at the end of the delay it may just arrive."""
ACK_CONFIRM_NS = 1 * SECOND_NS
"""How often acks ask for an answer, so that what is known to be durable need not be remembered."""
ACK_RANGES_MAX = 4096
"""Ranges of acks that wait at most, per consumer and partition, before they are sent."""
BATCH_MESSAGES_DEFAULT = 10_000

# the pump
TIMERS_QUIET_NS = 2 * MILLISECOND_NS
"""The timer thread sleeps at least this long while the application itself keeps every deadline."""
TIMERS_IDLE_NS = 5 * SECOND_NS

# sign-on
SERVER_KEYS_MAX = 8
"""Keys of the broker that are pinned at once: the old and the new one, with room to spare; each is tried."""
TOKEN_CHARACTERS_MAX = 16_384
"""Longer than any token that fits into a header of common HTTP servers."""
SIGN_ON_SECONDS = 10.0
"""From the look-up of the name to the last byte of the answer; a slower server is asked again."""
SIGN_ON_ANSWER_BYTES_MAX = 65_536
"""Of an answer with its headers; one with 8 keys has 600 bytes."""
SIGN_ON_PAUSE_NS = 1 * SECOND_NS
"""Two sign-ons are at least this far apart."""
SIGN_ON_BACKOFF_NS = 500 * MILLISECOND_NS
SIGN_ON_BACKOFF_NEEDED_NS_MAX = 2 * SECOND_NS
"""Longest pause between attempts while connections wait for a sign-on."""
SIGN_ON_BACKOFF_NS_MAX = 30 * SECOND_NS
"""Longest pause between attempts."""
SIGN_ON_RETRY_AFTER_NS_MAX = 60 * SECOND_NS
"""Longest pause that a server is granted which asks for one."""
KEY_SETTLE_NS = 3 * SECOND_NS
"""A worker may hear this much later of a key, or of a sign-on, that the coordinator knows: until then it is asked again."""
SIGN_ON_REFUSED_NS = 100 * MILLISECOND_NS
"""A connection that was refused asks again after this time."""
SIGN_ON_KEYS_NS = 500 * MILLISECOND_NS
"""Handshakes that fail for so long are a reason to ask for the broker's keys again."""
SIGN_ON_ANEW_NS = 30 * SECOND_NS
SIGN_ON_ANEW_MAX = 5
"""New sign-ons within that time because the broker refuses what it has just granted; then the client gives up."""
SIGN_ON_EXPIRES_SECONDS_MAX = 366 * 24 * 3600
SIGN_ON_JITTER = 0.1
"""Part by which a renewal comes earlier at random, so that clients that began together do not renew together."""
