"""Frames and bundles: the bytes that every other part passes along.

Nothing is imported here: `layout` needs only numpy, and the supervisor, which reads it, must not
load Numba. Import the modules:

    layout   every byte, drawn            crc, hash   checksums and the key hash
    pack     messages in, frame out       check       is this a frame?
    view     frame in, messages out       stamp       who writes which half of the header
    split    some messages of a frame     bundle      frames of many partitions in one part
    arrow    RecordBatch over a frame     codec       compression
"""
