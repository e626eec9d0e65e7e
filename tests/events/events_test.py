"""KV events of a running server: tests/events/run."""

import json
import random
import re
import subprocess
import sys
import time
import unittest
import urllib.request

from subscriber import Subscriber

FATHOM = sys.argv.pop(1)
BLOCK = 256
WORDS = "river stone cloud lamp seven green morning letter window garden salt engine".split()


class Server:
    """`fathom serve` with the demo model, on free ports."""

    def __init__(self, config, *flags, max_model_len=4096):
        self.subscribers = []
        config = {
            "enable_kv_cache_events": True,
            "endpoint": "tcp://127.0.0.1:*",
            "replay_endpoint": "tcp://127.0.0.1:*",
            **config,
        }
        self.process = subprocess.Popen(
            [FATHOM, "serve", "--host=127.0.0.1", "--port=0",
             f"--max-model-len={max_model_len}", "--kv-events-config", json.dumps(config), *flags],
            stderr=subprocess.PIPE, text=True)
        self.log = ""
        for line in self.process.stderr:
            self.log += line
            if ready := re.search(r"ready at (http://\S+)", line):
                self.base = ready[1]
                break
        else:
            self.process.communicate()
            raise RuntimeError("fathom serve ended:\n" + self.log)
        shown = re.search(r"KV events +(\S+), replay: (\S+)", self.log)
        self.endpoint, self.replay_endpoint = shown.groups() if shown else (None, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for subscriber in self.subscribers:
            subscriber.close()
        self.process.terminate()
        self.process.communicate()

    def post(self, path, body):
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def metric(self, name):
        with urllib.request.urlopen(self.base + "/metrics") as reply:
            page = reply.read().decode()
        return float(re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", page, re.M)[1])

    def tokens(self, count, seed):
        """A prompt of so many token ids."""
        words = random.Random(seed).choices(WORDS, k=2 * count)
        return self.post("/tokenize", {"prompt": " ".join(words)})["tokens"][:count]

    def complete(self, prompt, **fields):
        return self.post("/v1/completions",
                         {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields})

    def settle(self, events):
        """Takes what arrives until nothing runs and all that was published is there."""
        quiet = 0
        deadline = time.monotonic() + 60
        while quiet < 3:
            assert time.monotonic() < deadline, "events are missing"
            events.receive_for(0.1)
            there = self.metric("num_requests_running") == 0
            there = there and self.metric("kv_event_batches_total") == (events.next or 0)
            quiet = quiet + 1 if there else 0

    def subscribe(self, **options):
        """A subscriber whose subscription has taken effect."""
        events = Subscriber(self.endpoint, self.replay_endpoint, **options)
        self.subscribers.append(events)
        for seed in range(10_000, 10_100):
            self.complete(self.tokens(BLOCK + 100, seed))
            events.receive_for(0.2)
            if events.frames:
                return events
        raise AssertionError("nothing is published")


class Events(unittest.TestCase):
    def test_a_prompt_is_announced_once_and_replayed(self):
        with Server({"topic": "kv@node@demo"}) as server:
            events = server.subscribe(topic="kv@node")
            before = len(events.events)
            prompt = server.tokens(1000, 1)
            server.complete(prompt)
            server.settle(events)
            stored = [e for e in events.events[before:] if e["type"] == "BlockStored"]
            self.assertEqual(sum((e["token_ids"] for e in stored), []), prompt[: 3 * BLOCK])
            self.assertIsNone(stored[0]["parent_block_hash"])
            for event in stored:
                self.assertEqual(event["block_size"], BLOCK)
                self.assertEqual(event["medium"], "GPU")
                self.assertEqual(event["group_idx"], 0)
                self.assertEqual(event["extra_keys"], [None] * len(event["block_hashes"]))
            before = len(events.events)
            warm = server.complete(prompt)["usage"]
            server.settle(events)
            self.assertGreater(warm["prompt_tokens_details"]["cached_tokens"], 3 * BLOCK)
            self.assertEqual(events.events[before:], [])

            replayed = events.replay(0)
            self.assertEqual([number for _, number, _ in replayed], list(range(events.next)))
            for topic, number, payload in replayed:
                self.assertEqual(topic, b"kv@node@demo")
                if number in events.frames:
                    self.assertEqual(payload, events.frames[number])
            self.assertEqual(len(events.replay(events.next - 1)), 1)
            self.assertEqual(events.replay(events.next), [])
            self.assertEqual(server.metric("kv_event_batches_total"), events.next)
            self.assertEqual(server.metric("kv_event_batches_dropped_total"), 0)

    def test_whatever_is_announced_can_be_resumed(self):
        # Few blocks: prompts push each other out.
        with Server({}, "--max-num-seqs=2", max_model_len=2048) as server:
            events = server.subscribe()
            shared = server.tokens(600, 2)
            prompts = [(shared if seed % 3 == 0 else []) + server.tokens(700, 100 + seed)
                       for seed in range(12)]
            sessions = []
            for prompt in prompts:
                reply = server.complete(prompt, return_token_ids=True)
                sessions.append(prompt + reply["choices"][0]["token_ids"])
            server.settle(events)
            self.assertTrue(any(e["type"] == "BlockRemoved" for e in events.events))
            self.assertLessEqual(len(events.blocks), 2 * 2048 // BLOCK)
            # A path ends where a session can go on: its next turn skips all blocks of the path.
            resumed = 0
            for session in reversed(sessions):
                chains = events.chains()
                ends = [c for c in chains
                        if not any(len(d) > len(c) and d[: len(c)] == c for d in chains)]
                announced = max((len(c) for c in ends if c == session[: len(c)]), default=0)
                usage = server.complete(session + [5, 6, 7])["usage"]
                self.assertGreaterEqual(usage["prompt_tokens_details"]["cached_tokens"], announced)
                resumed += announced > 0
                server.settle(events)  # it may have pushed out others
            self.assertGreater(resumed, 1)

    def test_salted_blocks_say_so_and_keep_the_salt_to_themselves(self):
        with Server({}) as server:
            events = server.subscribe()
            prompt = server.tokens(600, 3)
            server.complete(prompt)
            server.complete(prompt, cache_salt="tenant-7")
            server.complete(prompt, cache_salt="tenant-8")
            server.settle(events)
            plain, first, second = [
                e for e in events.events
                if e["type"] == "BlockStored" and e["token_ids"][:BLOCK] == prompt[:BLOCK]]
            self.assertEqual(plain["extra_keys"][0], None)
            self.assertNotEqual(first["extra_keys"][0], second["extra_keys"][0])
            self.assertEqual(len({plain["block_hashes"][0], first["block_hashes"][0],
                                  second["block_hashes"][0]}), 3)
            for payload in events.frames.values():
                self.assertNotIn(b"tenant", payload)

    def test_arrays_for_older_readers(self):
        with Server({"encoding": "array"}) as server:
            events = server.subscribe()  # the subscriber checks the fields
            self.assertEqual(events.events[0]["type"], "BlockStored")
            self.assertIn(b"\xabBlockStored", next(iter(events.frames.values())))
            self.assertNotIn(b"token_ids", next(iter(events.frames.values())))

    def test_off_publishes_nothing(self):
        for config in ({"enable_kv_cache_events": False}, {"publisher": "null"}):
            with Server(config) as server:
                self.assertIsNone(server.endpoint)
                server.complete([5] * 300)

    def test_mistakes_end_the_start_by_name(self):
        def fails(config, status, part):
            result = subprocess.run([FATHOM, "serve", "--port=0", "--kv-events-config", config],
                                    capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, status, result.stderr)
            self.assertIn(part, result.stderr)

        fails('{"buffer_step": 1}', 2, "'buffer_step' is unknown")
        fails('{"hwm": "x"}', 2, "hwm must be an integer")
        fails("{", 2, "--kv-events-config")
        with Server({}) as server:
            taken = {"enable_kv_cache_events": True, "endpoint": "inproc://x",
                     "replay_endpoint": server.endpoint}
            fails(json.dumps(taken), 1, server.endpoint)


if __name__ == "__main__":
    unittest.main()
