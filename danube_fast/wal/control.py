"""Building control frames: frames of the reserved partition that carry the log's own records."""

from __future__ import annotations

from collections.abc import Sequence

from danube_fast.frame.check import body_crc
from danube_fast.frame.kernel import address_of, kernel
from danube_fast.frame.layout import CONTROL_PARTITION_ID, FLAG_CONTROL, At
from danube_fast.frame.memory import load_u16, load_u32, store_u16, store_u32
from danube_fast.frame.pack import encode_frame
from danube_fast.frame.stamp import stamp
from danube_fast.wal.writer import signed

__all__ = ["make_control_frame", "stamp_control_frame"]


@kernel("void(int64)")
def _mark_control(address: int) -> None:
    """Set the CONTROL flag of a sealed frame and seal it again."""
    store_u16(address + At.FLAGS, load_u16(address + At.FLAGS) | FLAG_CONTROL)
    store_u32(address + At.BODY_CRC32C, body_crc(address, load_u32(address + At.FRAME_BYTES)))


def make_control_frame(payloads: Sequence[bytes]) -> bytearray:
    """A sealed frame with the CONTROL flag that carries the records; it is not stamped yet."""
    frame = encode_frame(payloads)
    _mark_control(address_of(frame))
    return frame


def stamp_control_frame(
    frame: bytearray,
    count: int,
    *,
    log_id: int,
    position: int,
    base_offset: int,
    append_time_ns: int,
    synced_position: int,
    epoch: int,
) -> None:
    """Stamp a control frame of `count` records for `position`."""
    stamp(
        address_of(frame),
        signed(log_id),
        position,
        base_offset,
        append_time_ns,
        synced_position,
        CONTROL_PARTITION_ID,
        epoch,
        count,
    )
