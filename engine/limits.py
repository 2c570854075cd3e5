"""Every bound of the engine, as a named constant. Units are in the names.

A bound that an operator may want to move is a field of `Config` with its default here.
"""

from __future__ import annotations

from typing import Final

# Names
REQUEST_ID_BYTES_MAX: Final = 128
PEER_NAME_BYTES_MAX: Final = 128
REASON_CHARS_MAX: Final = 1000  # of a text that a peer is told

# What callers ask for
TOKENS_MAX: Final = 2**31 - 1  # ordinals travel as int32
PRIORITY_MAX: Final = 3  # either way; each step doubles the share of the bytes

# Control connection
FRAME_BYTES_MAX: Final = 64 * 1024
WIRE_VERSION_MIN: Final = 1
WIRE_VERSION_MAX: Final = 1
HANDSHAKE_S: Final = 10.0
AGENT_STOP_S: Final = 5.0  # for an agent to end, beyond what closing waits for writes
HANG_UP_S: Final = 1.0  # for the last messages of a connection that is given up
CLOCK_TICK_S: Final = 0.001
DIAL_S: Final = 5.0
CLOSE_S: Final = 5.0
AUX_BYTES_MAX: Final = 64 * 1024
SMALL_MESSAGE_BYTES_MAX: Final = 256 * 1024
OFFER_BYTES_MAX: Final = 16 * 1024 * 1024
GEOMETRY_BYTES_MAX: Final = 16 * 1024 * 1024
UNSETTLED_KEYS_MAX: Final = 1000  # in one message
STREAMS_OPEN_MAX: Final = 64  # half-received messages of one connection
REDIAL_DELAY_MIN_S: Final = 0.05
REDIAL_DELAY_MAX_S: Final = 2.0

# Permit: the source may post for this long after it asked, and asks three times as often
PERMIT_TTL_S: Final = 10.0
PERMIT_RENEWALS_PER_TTL: Final = 3
PERMIT_TTL_MIN_S: Final = 0.1  # whoever grants less is not asked more often for it
PERMIT_LINGER_S: Final = 30.0
CLOCK_RATE_ERROR: Final = 0.01

# Tables
OFFERS_WAITING_MAX: Final = 4096  # of one peer
OFFERS_WAITING_BYTES_MAX: Final = 64 * 1024 * 1024  # of one peer
SENDS_MAX: Final = 16384
RECEIVES_MAX: Final = 16384
TOMBSTONES_MAX: Final = 65536
UNCLEAN_KEYS_MAX: Final = 65536  # beyond it, no forgotten key is called clean
TOMBSTONE_S: Final = 300.0

# Planning and posting
PLAN_STEP_DESCRIPTORS_MAX: Final = 16384  # planned at once: below 2 ms, and in the cache
TRANSFERS_ADMITTED_MAX: Final = 256  # over all peers; each may hold one planned step, of 384 KiB
PEER_ADMITTED_MIN: Final = 8  # that a peer gets even then: 3 MiB of planned steps
TURN_WRITES_MAX: Final = 16  # at priority 0, before it is another transfer's turn
PUMP_WRITES_MAX: Final = 16  # handed over before the loop may do something else
PEER_POSTED_BYTES_MAX: Final = 32 * 1024 * 1024
PEER_POSTED_WRITES_MAX: Final = 32

# Deadlines of a transfer
MATCH_S: Final = 60.0
STALL_S: Final = 60.0
TOTAL_S: Final = 3600.0

# Diagnosis
STORY_EVENTS_MAX: Final = 64  # flight recorder, of one transfer
