"""Producers, consumers and readers of an AsyncClient: the same names with `await`.

Most methods are made of their synchronous twins and run the same steps in the event loop (`link/loop.py`).
Cancelling a receive loses no message: messages are taken only when the call returns. Cancelling a publish
leaves the message on its way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from danube_fast.client.consume.batch import Batch
from danube_fast.client.consume.inbox import Inbox
from danube_fast.client.consumer import Consumer, ConsumerView
from danube_fast.client.faces import AsyncClosing, twin
from danube_fast.client.link.loop import LoopDriver
from danube_fast.client.link.steps import deadline_after
from danube_fast.client.produce.publisher import Publisher
from danube_fast.client.producer import Producer, ProducerView
from danube_fast.client.reader import Reader, ReaderView
from danube_fast.client.values.limits import BATCH_MESSAGES_DEFAULT
from danube_fast.client.values.message import Message

__all__ = ["AsyncConsumer", "AsyncProducer", "AsyncReader"]


class AsyncProducer(ProducerView, AsyncClosing):
    """Publishes to one topic. Made by `client.producer()`. The methods are those of Producer, to be awaited."""

    __slots__ = ()
    _run: Any

    def __init__(self, publisher: Publisher, driver: LoopDriver) -> None:
        super().__init__(publisher, driver.run, driver.end)

    send = twin(Producer.send)
    send_many = twin(Producer.send_many)
    publish = twin(Producer.publish)
    flush = twin(Producer.flush)
    close = twin(Producer.close)


class AsyncConsumer(ConsumerView, AsyncClosing):
    """Receives from topics. Made by `client.consumer()`. The methods are those of Consumer, to be awaited."""

    _run: Any

    def __init__(self, inbox: Inbox, driver: LoopDriver) -> None:
        super().__init__(inbox, driver.run, driver.end)

    async def receive(self, timeout: float | None = None) -> Message | None:  # noqa: ASYNC109
        """Return the next message; None when `timeout` seconds are over."""
        for message in self._inbox.frames:
            return message
        deadline_ns = deadline_after(self._inbox.pump.clock, timeout)
        found: Message | None = await self._run(self._inbox.receive_steps(deadline_ns))
        return found

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Return messages for ever; ends when the consumer is closed."""
        inbox = self._inbox
        while not inbox._closed:
            for message in inbox.frames:
                yield message
            if not inbox._closed:
                await self._run(inbox.next_steps(None))

    receive.__doc__ = Consumer.receive.__doc__
    ack = twin(Consumer.ack)
    receive_batch = twin(Consumer.receive_batch)
    ack_cumulative = twin(Consumer.ack_cumulative)
    nack = twin(Consumer.nack)
    extend = twin(Consumer.extend)
    flush_acks = twin(Consumer.flush_acks)
    seek = twin(Consumer.seek)
    lag = twin(Consumer.lag)
    close = twin(Consumer.close)


class AsyncReader(ReaderView, AsyncClosing):
    """Reads a range of a topic. Made by `client.reader()`; iterate over it once. The methods are those of Reader,
    to be awaited."""

    _run: Any

    def __init__(self, inbox: Inbox, stop: int | str | None, driver: LoopDriver) -> None:
        super().__init__(inbox, stop, driver.run, driver.end)

    receive_batch = twin(Reader.receive_batch)
    close = twin(Reader.close)

    async def batches(self, max_messages: int = BATCH_MESSAGES_DEFAULT) -> AsyncIterator[Batch]:
        """Return the whole range in batches."""
        while batch := await self.receive_batch(max_messages):
            yield batch

    async def __aiter__(self) -> AsyncIterator[Message]:
        async for batch in self.batches():
            for message in batch:
                yield message
        await self.close()

    async def to_arrow(self) -> Any:
        """Return the whole range as a pyarrow.Table."""
        self._range.must_end()
        return (await self._run(self._range.all_steps())).to_arrow()

    async def to_pandas(self) -> Any:
        """Return the whole range as a pandas.DataFrame."""
        return (await self.to_arrow()).to_pandas()

    batches.__doc__ = Reader.batches.__doc__
    to_arrow.__doc__ = Reader.to_arrow.__doc__
    to_pandas.__doc__ = Reader.to_pandas.__doc__
