"""Compression of a frame's body: lz4 (block format) and zstd.

The whole body is compressed as one piece; the header stays readable, so the broker never opens a
compressed frame. `body_padding` bytes at the end fill the frame up to a multiple of 8.

    | header 128 | compressed body | 0 to 7 zeros |

A frame that would not become smaller is left alone.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import lz4.block
import zstandard

from danube_fast.errors import DataLoss
from danube_fast.frame.layout import COMPRESSED_BODY_BYTES_MAX, HEADER_BYTES, At, Codec, padded

__all__ = ["compress_frame", "decompress_body"]

_U32 = struct.Struct("<I")
_LZ4_RATIO_MAX = 256  # the format's own limit is 255 output bytes for each input byte
_thread = threading.local()  # zstd contexts must not be used by two threads at once


def _zstd_compress(body: Any) -> bytes:
    compressor = getattr(_thread, "compressor", None)
    if compressor is None:
        compressor = _thread.compressor = zstandard.ZstdCompressor(level=1)
    return bytes(compressor.compress(body))


def _zstd_decompress(body: Any, raw_body_bytes: int) -> bytes:
    decompressor = getattr(_thread, "decompressor", None)
    if decompressor is None:
        decompressor = _thread.decompressor = zstandard.ZstdDecompressor()
    if zstandard.frame_content_size(body) not in (raw_body_bytes, -1):
        raise ValueError("the content size of the zstd frame is not raw_body_bytes")
    return bytes(decompressor.decompress(body, max_output_size=raw_body_bytes))


def compress_frame(frame: bytearray, codec: Codec) -> bytearray:
    """The frame with its body compressed, or `frame` itself if that saves nothing.

    The header is right but for the crcs: seal it afterwards.
    """
    body = memoryview(frame)[HEADER_BYTES:]
    if body.nbytes > COMPRESSED_BODY_BYTES_MAX:
        return frame
    if codec == Codec.LZ4:
        packed = lz4.block.compress(body, store_size=False)
    else:
        packed = _zstd_compress(body)
    frame_bytes = HEADER_BYTES + padded(len(packed))
    if frame_bytes >= len(frame):
        return frame
    out = bytearray(frame_bytes)
    out[:HEADER_BYTES] = frame[:HEADER_BYTES]
    out[HEADER_BYTES : HEADER_BYTES + len(packed)] = packed
    out[At.CODEC] = codec
    out[At.BODY_PADDING] = frame_bytes - HEADER_BYTES - len(packed)
    _U32.pack_into(out, At.FRAME_BYTES, frame_bytes)
    return out


def decompress_body(packed: Any, codec: int, raw_body_bytes: int) -> bytes:
    """The body of a compressed frame: exactly `raw_body_bytes` bytes, never more.

    Raises DataLoss if it is anything else.
    """
    if raw_body_bytes > COMPRESSED_BODY_BYTES_MAX:
        raise DataLoss(
            f"a compressed frame claims {raw_body_bytes} bytes, over the limit of "
            f"{COMPRESSED_BODY_BYTES_MAX}; read the data from another copy"
        )
    try:
        if codec == Codec.LZ4:
            if raw_body_bytes > _LZ4_RATIO_MAX * len(packed):
                raise ValueError("more than lz4 can hold")
            body = bytes(lz4.block.decompress(packed, uncompressed_size=raw_body_bytes))
        else:
            body = _zstd_decompress(packed, raw_body_bytes)
    except (ValueError, MemoryError, lz4.block.LZ4BlockError, zstandard.ZstdError) as error:
        raise DataLoss(
            f"a frame's body cannot be decompressed ({error}); read the data from another copy"
        ) from None
    if len(body) != raw_body_bytes:
        raise DataLoss(
            f"a frame's body has {len(body)} bytes instead of {raw_body_bytes}; "
            "read the data from another copy"
        )
    return body
