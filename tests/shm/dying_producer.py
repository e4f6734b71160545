"""Publishes through shared memory as fast as it can until it is killed.

    python -m tests.shm.dying_producer URL TOPIC LIFE

Message n of a life is (life, n) and a filling that both say. Whatever is acked is written to stdout,
the number alone, before more is sent.
"""

from __future__ import annotations

import os
import random
import struct
import sys

import danube_fast

HEAD = struct.Struct("<II")
SIZES_MAX = 6000
"""Larger than the test's rings allow in one record, when many go in one frame."""


def payload_of(life: int, number: int) -> bytes:
    """The message that belongs to a number."""
    draw = random.Random(life << 32 | number)
    return HEAD.pack(life, number) + draw.randbytes(draw.choice((0, 10, 100, SIZES_MAX)))


def main() -> None:
    """Until SIGKILL."""
    url, topic, life = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with danube_fast.connect(url, transport="shm") as client:
        producer = client.producer(topic, durability="os")
        number = 0
        while True:
            count = (1, 3, 40, 300)[number % 4]
            for _ in range(count):
                producer.send(payload_of(life, number))
                number += 1
            if number % 3 == 0:
                producer.flush()
                os.write(1, HEAD.pack(life, number))


if __name__ == "__main__":
    main()
