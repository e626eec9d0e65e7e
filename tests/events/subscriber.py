"""Follows the KV events of a server: what a router does, in a page.

    events = Subscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    events.receive_for(1.0)
    events.blocks        # what the node holds: (medium, hash) -> Block
    events.replay(0)     # past batches, from a sequence number on
"""

import time
from dataclasses import dataclass

import msgpack
import zmq

END = (2**64 - 1).to_bytes(8, "big")


@dataclass
class Block:
    parent: int | None
    tokens: list
    salted: bool


class Subscriber:
    def __init__(self, endpoint, replay_endpoint=None, topic=""):
        context = zmq.Context.instance()
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.live.connect(endpoint)
        self.requests = None
        if replay_endpoint:
            self.requests = context.socket(zmq.DEALER)
            self.requests.connect(replay_endpoint)
        self.blocks = {}
        self.next = None  # sequence number
        self.frames = {}  # sequence number -> payload
        self.events = []

    def close(self):
        self.live.close()
        if self.requests:
            self.requests.close()

    def receive_for(self, seconds):
        """Takes what arrives until nothing has come for so long."""
        until = time.monotonic() + seconds
        while self.live.poll(max(0, int(1000 * (until - time.monotonic())))):
            topic, sequence, payload = self.live.recv_multipart()
            number = int.from_bytes(sequence, "big")
            assert len(sequence) == 8
            assert self.next is None or number == self.next, f"a gap before {number}"
            self.next = number + 1
            self.apply(number, payload)
            until = time.monotonic() + seconds

    def replay(self, first):
        """The kept batches from `first` on, as (topic, number, payload)."""
        self.requests.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while self.requests.poll(10_000):
            empty, topic, sequence, payload = self.requests.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert topic == b"" and payload == b""
                return batches
            batches.append((topic, int.from_bytes(sequence, "big"), payload))
        raise AssertionError("no end marker")

    def apply(self, number, payload):
        self.frames[number] = payload
        timestamp, events, rank = msgpack.unpackb(payload)
        assert isinstance(timestamp, float) and abs(timestamp - time.time()) < 600
        assert rank == 0
        for event in events:
            event = as_map(event)
            self.events.append(event)
            self.apply_event(event)

    def apply_event(self, event):
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self.blocks.pop((event["medium"], name), None)  # before this one listened, else
        else:
            assert event["type"] == "BlockStored", event
            size, parent = event["block_size"], event["parent_block_hash"]
            hashes, tokens = event["block_hashes"], event["token_ids"]
            assert len(tokens) == size * len(hashes), event
            assert len(event["extra_keys"]) == len(hashes)
            for i, name in enumerate(hashes):
                salted = event["extra_keys"][i] is not None
                if parent is not None:
                    known = [b for (_, n), b in self.blocks.items() if n == parent]
                    assert known, f"the parent of {name} was never announced"
                    salted = known[0].salted
                part = tokens[i * size : (i + 1) * size]
                self.blocks[(event["medium"], name)] = Block(parent, part, salted)
                parent = name

    def chains(self):
        """The token lists of all announced paths without salt."""
        by_name = {name: block for (_, name), block in self.blocks.items()}
        lists = []
        for name, block in by_name.items():
            tokens = []
            while name is not None and name in by_name:
                tokens = by_name[name].tokens + tokens
                name = by_name[name].parent
            if name is None and not block.salted:
                lists.append(tokens)
        return lists


FIELDS = {
    "BlockStored": ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size",
                    "lora_id", "medium", "lora_name", "extra_keys", "group_idx",
                    "kv_cache_spec_kind"],
    "BlockRemoved": ["type", "block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": ["type"],
}


def as_map(event):
    """An event in either encoding as a map."""
    if isinstance(event, dict):
        assert list(event) == FIELDS[event["type"]], event
        return event
    assert len(event) == len(FIELDS[event[0]]), event
    return dict(zip(FIELDS[event[0]], event))
