"""The client halves of Mosquitto, RabbitMQ and Kafka against stand-ins that speak their protocols.

No figure comes from here: what is proved is that messages arrive whole through the real roles, that each
variant asks the server for what its row says, and that what a server refuses is one sentence. A client
that is not installed fails this file: it is a requirement of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import confluent_kafka
import pytest

from danube_fast.bench.load.rig import Rig
from danube_fast.bench.peers import kafka, mosquitto, rabbitmq, runs
from danube_fast.bench.peers.adapter import Adapter, Variant
from danube_fast.bench.plan import Plan
from danube_fast.errors import Unavailable
from tests.bench.stand_in import WAIT_SECONDS, AmqpStandIn, MqttStandIn, StandIn
from tests.workers.broker import wait_until

SIZE = 100
MESSAGES, PACED = 10_500, 50
"""More than a list, so that a list's end is seen, too."""
EXCHANGED = 20
SENT = MESSAGES + PACED


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture
def stand_in(request: pytest.FixtureRequest) -> Iterator[Any]:
    server: StandIn = request.param()
    try:
        yield server
    finally:
        server.stop()
    assert not server.problems, server.problems


def run_both(rig: Rig, adapter: Adapter, variant: Variant, server: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:  # there is no server to ask
        patch.setattr(type(adapter), "version", lambda _: "a stand-in")
        bench = runs.Bench(rig, adapter, variant, server)
    plans = [
        Plan(workload="throughput", messages=MESSAGES, message_bytes=SIZE),
        Plan(workload="latency", messages=PACED, message_bytes=SIZE, rate=500.0),
    ]
    for plan in plans:
        figures = bench.run(plan)
        assert (figures.lost, figures.duplicated, figures.corrupted) == (0, 0, 0)
        assert (figures.system, figures.durability) == (variant.system, variant.durability)
        assert figures.messages_per_s


def members_options(variant: Variant, address: str, **changes: Any) -> dict[str, Any]:
    return (
        variant.options
        | {"address": address, "topic": "t", "topics": 1, "message_bytes": SIZE}
        | changes
    )


def exchange(adapter: Adapter, options: dict[str, Any]) -> None:
    """A list and as many one by one, in this process; all come, once and in order."""
    size = options["message_bytes"]
    sent = [number.to_bytes(8, "little") * (size // 8) for number in range(2 * EXCHANGED)]
    came: list[bytes] = []

    def take(some: list[bytes]) -> bool:
        came.extend(some)
        return len(came) < len(sent)

    due: list[int] = []
    with ThreadPoolExecutor(1) as pool, closing(adapter.open_receiver(options)) as receiver:
        reading = pool.submit(receiver.receive, take, WAIT_SECONDS)
        with closing(adapter.open_sender(options)) as sender:
            sender.send_lists([sent[: EXCHANGED // 2], sent[EXCHANGED // 2 : EXCHANGED]])
            sender.send_each(sent[EXCHANGED:], due.append)
        reading.result(2 * WAIT_SECONDS)
        receiver.receive(take, 0.05)  # and nothing more
    assert due == list(range(EXCHANGED))
    assert came == sent


def ids(variant: Variant) -> str:
    return variant.system


# ------------------------------------------------------------------ MQTT


@pytest.mark.parametrize("stand_in", [MqttStandIn], indirect=True)
@pytest.mark.parametrize("variant", mosquitto.Mosquitto.variants[:2], ids=ids)
def test_mqtt_end_to_end(rig: Rig, variant: Variant, stand_in: MqttStandIn) -> None:
    run_both(rig, mosquitto.Mosquitto(), variant, stand_in)
    seen = stand_in.seen
    if variant.options["qos"]:
        wait_until("every message's PUBACK", lambda: seen["puback"] == SENT)
        assert (seen["publish qos 1"], seen["publish qos 0"]) == (SENT, 0)
        assert (seen["kept"], seen["clean"], seen["subscribe qos 1"]) == (4, 0, 2)
    else:
        lists = 2
        assert (seen["publish qos 0"], seen["publish qos 1"]) == (SENT, lists)
        assert (seen["kept"], seen["clean"], seen["puback"]) == (0, 4, 0)


@pytest.mark.parametrize("stand_in", [MqttStandIn], indirect=True)
def test_an_mqtt_server_that_refuses_or_goes_is_one_sentence(stand_in: MqttStandIn) -> None:
    adapter, variant = mosquitto.Mosquitto(), mosquitto.Mosquitto.variants[1]
    options = members_options(variant, stand_in.address)
    receiver, sender = adapter.open_receiver(options), adapter.open_sender(options)
    stand_in.hang_up()
    with pytest.raises(Unavailable, match="MQTT"):
        sender.send_lists([[bytes(SIZE)] * 10])
    with pytest.raises(Unavailable, match="MQTT"):
        receiver.receive(lambda _: True, WAIT_SECONDS)
    sender.close()
    receiver.close()
    stand_in.refuses = True
    with pytest.raises(Unavailable, match="the MQTT server refused: Not authorized"):
        adapter.open_sender(options)


# ------------------------------------------------------------------ AMQP


@pytest.mark.parametrize("stand_in", [AmqpStandIn], indirect=True)
def test_amqp_end_to_end(rig: Rig, stand_in: AmqpStandIn) -> None:
    run_both(rig, rabbitmq.RabbitMQ(), rabbitmq.RabbitMQ.variants[1], stand_in)
    seen = stand_in.seen
    assert (seen["delivery mode 2"], seen["acked"]) == (SENT, MESSAGES)  # the highest of either run
    assert (seen["Confirm.Select"], seen["Basic.Qos"], seen["Queue.Delete"]) == (2, 2, 2)


@pytest.mark.parametrize("stand_in", [AmqpStandIn], indirect=True)
@pytest.mark.parametrize("variant", rabbitmq.RabbitMQ.variants, ids=ids)
def test_each_amqp_variant_asks_for_its_queue(variant: Variant, stand_in: AmqpStandIn) -> None:
    long = 300_000  # three frames
    exchange(rabbitmq.RabbitMQ(), members_options(variant, stand_in.address, message_bytes=long))
    seen, kind = stand_in.seen, variant.options["queue"]
    mode = 2 if variant.options["is_persistent"] else 1
    assert [seen["delivery mode 1"], seen["delivery mode 2"]][mode - 1] == 2 * EXCHANGED
    assert ("transient" in variant.durability) == (mode == 1)
    offsets = {"x-stream-offset": "first"} if kind == "stream" else {}
    assert stand_in.arguments == [{"x-queue-type": kind}, offsets]


@pytest.mark.parametrize("stand_in", [AmqpStandIn], indirect=True)
def test_an_amqp_server_that_refuses_or_goes_is_one_sentence(stand_in: AmqpStandIn) -> None:
    adapter, variant = rabbitmq.RabbitMQ(), rabbitmq.RabbitMQ.variants[1]
    options = members_options(variant, stand_in.address)
    receiver, sender = adapter.open_receiver(options), adapter.open_sender(options)
    stand_in.refuses = True
    with pytest.raises(Unavailable, match="the AMQP server refused message"):
        sender.send_lists([[bytes(SIZE)] * 10])
    stand_in.hang_up()
    with pytest.raises(Unavailable, match="the AMQP server ended it"):
        receiver.receive(lambda _: True, WAIT_SECONDS)
    sender.close()
    receiver.close()


# ------------------------------------------------------------------ Kafka


class MockCluster:
    """The one inside librdkafka; it ends with its producer."""

    def __init__(self) -> None:
        self._owner: Any = confluent_kafka.Producer(
            {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0}
        )
        (broker,) = self._owner.list_topics(timeout=WAIT_SECONDS).brokers.values()
        self.address = f"{broker.host}:{broker.port}"

    def cpu_seconds(self) -> float:
        return 0.0

    def resident_mb(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def cluster() -> MockCluster:
    return MockCluster()


def test_kafka_end_to_end(rig: Rig, cluster: MockCluster) -> None:
    run_both(rig, kafka.Kafka(), kafka.Kafka.variants[2], cluster)


@pytest.mark.parametrize("variant", kafka.Kafka.variants[:3], ids=ids)
def test_kafka_with_each_acks(variant: Variant, cluster: MockCluster) -> None:
    topic = variant.options["acks"]
    exchange(kafka.Kafka(), members_options(variant, cluster.address, topic=topic))


def test_a_kafka_queue_that_is_full_is_waited_for(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "window_messages", lambda _: 2)
    options = members_options(kafka.Kafka.variants[1], cluster.address, topic="narrow")
    exchange(kafka.Kafka(), options)


@pytest.mark.parametrize("adapter", [kafka.Kafka(), kafka.Redpanda()], ids=lambda x: x.name)
def test_a_row_of_the_kafka_protocol_has_the_acks_of_its_name(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Caught(Exception):
        pass

    def catch(settings: dict[str, Any]) -> None:
        raise Caught(settings["acks"])

    monkeypatch.setattr(confluent_kafka, "Producer", catch)
    for variant in adapter.variants:
        with pytest.raises(Caught) as caught:
            adapter.open_sender(members_options(variant, "127.0.0.1:1"))
        assert variant.system.endswith(f" acks={caught.value}")
        assert variant.is_lossy == (str(caught.value) == "0")
    assert {variant.options["acks"] for variant in adapter.variants} == {"0", "1", "all"}


def test_what_the_kafka_client_or_server_refuses_is_one_sentence(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "WINDOW_BYTES", 2000)
    options = members_options(kafka.Kafka.variants[1], cluster.address)
    sender: Any = kafka.Kafka().open_sender(options)
    with pytest.raises(Unavailable, match=r"took 1 of 2 messages.*too large"):
        sender.send_lists([[bytes(10), bytes(5000)]])
    sender._note(confluent_kafka.KafkaError(confluent_kafka.KafkaError.REQUEST_TIMED_OUT), None)
    with pytest.raises(Unavailable, match=r"REQUEST_TIMED_OUT|[Tt]imed out"):
        sender.send_each([bytes(10)], lambda _: None)
    sender.close()
