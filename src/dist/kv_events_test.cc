#include "dist/kv_events.h"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <zmq.hpp>

namespace fathom {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

const BlockHasher kHasher;

// Blocks of `size` tokens that count on from `first_token`, the chain of a prompt under `salt`.
std::vector<CacheEvent> StoredChain(int blocks, int size, TokenId first_token,
                                    const std::string& salt = "") {
  std::vector<CacheEvent> events;
  BlockHash parent = kHasher.Root(salt);
  for (int i = 0; i < blocks; ++i) {
    CacheEvent event;
    event.first = i == 0;
    event.parent = parent;
    for (int j = 0; j < size; ++j) event.tokens.push_back(first_token++);
    event.hash = kHasher.Next(parent, event.tokens);
    parent = event.hash;
    events.push_back(std::move(event));
  }
  return events;
}

CacheEvent Removed(const CacheEvent& stored, CacheTier tier = CacheTier::kDevice) {
  CacheEvent event;
  event.kind = CacheEvent::Kind::kRemoved;
  event.tier = tier;
  event.hash = stored.hash;
  return event;
}

KvEventFormat Format(KvEventEncoding encoding = KvEventEncoding::kMap) {
  return {.block_tokens = 4, .encoding = encoding, .common_root = kHasher.Root("")};
}

json Decode(const std::string& bytes) {
  return json::from_msgpack(bytes);
}

TEST(KvEventEncoding, AChainIsOneBlockStoredWithVllmsKeys) {
  const std::vector<CacheEvent> events = StoredChain(2, 4, 100'000);
  const std::string bytes = EncodeKvEvents(events, 1234.5, Format());
  const json batch = Decode(bytes);
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_EQ(batch[0], 1234.5);
  EXPECT_EQ(batch[2], 0);
  const json expected = {
      {"type", "BlockStored"},
      {"block_hashes", {events[0].hash.word(), events[1].hash.word()}},
      {"parent_block_hash", nullptr},
      {"token_ids", {100'000, 100'001, 100'002, 100'003, 100'004, 100'005, 100'006, 100'007}},
      {"block_size", 4},
      {"lora_id", nullptr},
      {"medium", "GPU"},
      {"lora_name", nullptr},
      {"extra_keys", {nullptr, nullptr}},
      {"group_idx", 0},
      {"kv_cache_spec_kind", "full_attention"}};
  EXPECT_EQ(batch[1], json::array({expected}));
  // The tag is the first key of the map: a map of 11 follows the array headers and the timestamp.
  EXPECT_THAT(bytes, HasSubstr(std::string("\x91\x8b\xa4type\xab") + "BlockStored"));
}

TEST(KvEventEncoding, AsArraysTheFieldsKeepVllmsOrder) {
  std::vector<CacheEvent> events = StoredChain(2, 4, 7);
  events.erase(events.begin());  // its parent was announced before
  events.push_back(Removed(events[0], CacheTier::kHost));
  events.push_back({.kind = CacheEvent::Kind::kCleared});
  const json batch = Decode(EncodeKvEvents(events, 1, Format(KvEventEncoding::kArray)));
  EXPECT_EQ(batch[1][0], json({"BlockStored",
                               json::array({events[0].hash.word()}),
                               events[0].parent.word(),
                               {11, 12, 13, 14},
                               4,
                               nullptr,
                               "GPU",
                               nullptr,
                               json::array({nullptr}),
                               0,
                               "full_attention"}));
  EXPECT_EQ(batch[1][1], json({"BlockRemoved", json::array({events[0].hash.word()}), "CPU", 0}));
  EXPECT_EQ(batch[1][2], json::array({"AllBlocksCleared"}));
}

TEST(KvEventEncoding, RunsEndWhereChainKindOrTierChange) {
  const std::vector<CacheEvent> a = StoredChain(2, 4, 0), b = StoredChain(1, 4, 50);
  std::vector<CacheEvent> events = {a[0], a[1], b[0], Removed(a[1]), Removed(b[0])};
  events.push_back(Removed(a[0], CacheTier::kDisk));
  const json list = Decode(EncodeKvEvents(events, 1, Format()))[1];
  ASSERT_EQ(list.size(), 4u);
  EXPECT_EQ(list[0]["block_hashes"].size(), 2u);
  EXPECT_EQ(list[1]["block_hashes"], json::array({b[0].hash.word()}));
  EXPECT_EQ(list[2], json({{"type", "BlockRemoved"},
                           {"block_hashes", {a[1].hash.word(), b[0].hash.word()}},
                           {"medium", "GPU"},
                           {"group_idx", 0}}));
  EXPECT_EQ(list[3]["medium"], "STORAGE");
}

TEST(KvEventEncoding, HashesAreUnsignedWordsOfEightBytes) {
  CacheEvent event;
  event.kind = CacheEvent::Kind::kRemoved;
  event.hash.bytes.fill(0xff);
  const std::string bytes = EncodeKvEvents({event}, 1, Format());
  EXPECT_THAT(bytes, HasSubstr(std::string("\xcf") + std::string(8, '\xff')));
}

TEST(KvEventEncoding, ASaltShowsAsAnExtraKeyAndIsNotTold) {
  const std::vector<CacheEvent> events = StoredChain(2, 4, 0, "tenant-7");
  const std::string bytes = EncodeKvEvents(events, 1, Format());
  const json stored = Decode(bytes)[1][0];
  EXPECT_EQ(stored["extra_keys"],
            json::array({json::array({kHasher.Root("tenant-7").Hex()}), nullptr}));
  EXPECT_EQ(bytes.find("tenant-7"), std::string::npos);
}

// --- sockets -------------------------------------------------------------------------------------

// A name of its own for every test: inproc addresses are the context's, ipc files the machine's.
std::string IpcEndpoint(const char* name) {
  return "ipc://" + (std::filesystem::temp_directory_path() /
                     ("fathom-" + std::to_string(getpid()) + "-" + name))
                        .string();
}

struct Message {
  std::string topic, payload;
  uint64_t sequence = 0;
  json batch() const { return Decode(payload); }
};

// A message that comes is waited for, however busy the machine is.
constexpr int kPatienceMs = 120'000;

class Subscriber {
 public:
  explicit Subscriber(const KvEventPublisher& publisher, const std::string& topic = "")
      : subscribe_(context_, zmq::socket_type::sub), replay_(context_, zmq::socket_type::dealer) {
    subscribe_.set(zmq::sockopt::subscribe, topic);
    subscribe_.set(zmq::sockopt::rcvtimeo, kPatienceMs);
    replay_.set(zmq::sockopt::rcvtimeo, kPatienceMs);
    subscribe_.set(zmq::sockopt::linger, 0);
    replay_.set(zmq::sockopt::linger, 0);
    subscribe_.connect(publisher.endpoint());
    if (!publisher.replay_endpoint().empty()) replay_.connect(publisher.replay_endpoint());
  }

  std::optional<Message> Receive() { return Receive(subscribe_); }

  // Everything from `first` on; fails the test when there is no end marker.
  std::vector<Message> Replay(uint64_t first) {
    SendReplay({"", Big(first)});
    std::vector<Message> messages;
    while (std::optional<Message> message = Receive(replay_)) {
      if (message->sequence == ~uint64_t{0}) {
        EXPECT_EQ(message->topic + message->payload, "");
        return messages;
      }
      messages.push_back(std::move(*message));
    }
    ADD_FAILURE() << "no end marker";
    return messages;
  }

  void SendReplay(const std::vector<std::string>& frames) {
    for (size_t i = 0; i < frames.size(); ++i) {
      const bool last = i + 1 == frames.size();
      replay_.send(zmq::buffer(frames[i]), last ? zmq::send_flags::none : zmq::send_flags::sndmore);
    }
  }

  static std::string Big(uint64_t value) {
    std::string bytes;
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
    return bytes;
  }

 private:
  std::optional<Message> Receive(zmq::socket_t& socket) {
    std::vector<std::string> frames;
    zmq::message_t frame;
    do {
      if (!socket.recv(frame)) return std::nullopt;
      frames.push_back(frame.to_string());
    } while (frame.more());
    if (&socket == &replay_) {
      EXPECT_EQ(frames[0], "");
      frames.erase(frames.begin());
    }
    EXPECT_EQ(frames.size(), 3u);
    if (frames.size() != 3) return std::nullopt;
    EXPECT_EQ(frames[1].size(), 8u);
    Message message{frames[0], frames[2]};
    for (const char c : frames[1]) message.sequence = message.sequence << 8 | uint8_t(c);
    return message;
  }

  zmq::context_t context_{1};
  zmq::socket_t subscribe_, replay_;
};

std::unique_ptr<KvEventPublisher> StartPublisher(KvEventsConfig config) {
  config.enable_kv_cache_events = true;
  config.publisher = "zmq";
  auto publisher = KvEventPublisher::Start(config, Format());
  EXPECT_TRUE(publisher) << publisher.error().message;
  return publisher ? std::move(*publisher) : nullptr;
}

// A subscription takes effect some time after connect: publishes until something arrives, and
// returns the sequence number that comes next.
uint64_t AwaitSubscription(KvEventPublisher& publisher, Subscriber& subscriber) {
  std::atomic<bool> arrived{false};
  uint64_t published = 0;
  std::thread publishes([&] {
    while (!arrived) {
      publisher.Publish({{.kind = CacheEvent::Kind::kCleared}});
      ++published;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const std::optional<Message> first = subscriber.Receive();
  arrived = true;
  publishes.join();
  EXPECT_TRUE(first);
  if (!first) return 0;
  for (uint64_t next = first->sequence + 1; next < published; ++next) {
    const std::optional<Message> message = subscriber.Receive();
    EXPECT_TRUE(message);
    if (message) {
      EXPECT_EQ(message->sequence, next);
    }
  }
  return published;
}

TEST(KvEvents, ASubscriberGetsEveryBatchInOrder) {
  auto publisher = StartPublisher({.endpoint = "tcp://127.0.0.1:*", .topic = "kv@node@demo"});
  ASSERT_THAT(publisher->endpoint(), HasSubstr("tcp://127.0.0.1:"));
  EXPECT_EQ(publisher->replay_endpoint(), "");
  Subscriber subscriber(*publisher, "kv@");
  const uint64_t next = AwaitSubscription(*publisher, subscriber);
  constexpr uint64_t kBatches = 200;
  for (uint64_t i = 0; i < kBatches; ++i) {
    publisher->Publish(StoredChain(1, 4, static_cast<TokenId>(10 * i)));
  }
  publisher->Publish({});  // nothing: no batch
  for (uint64_t i = 0; i < kBatches; ++i) {
    const std::optional<Message> message = subscriber.Receive();
    ASSERT_TRUE(message) << i;
    EXPECT_EQ(message->topic, "kv@node@demo");
    EXPECT_EQ(message->sequence, next + i);
    const json batch = message->batch();
    EXPECT_GT(batch[0], 1.7e9);  // seconds, this century
    EXPECT_EQ(batch[1][0]["token_ids"], json({10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3}));
  }
  EXPECT_EQ(publisher->stats().batches, next + kBatches);
  EXPECT_EQ(publisher->stats().events, next + kBatches);
  EXPECT_EQ(publisher->stats().dropped_batches, 0u);
}

TEST(KvEvents, ReplayGivesPastBatchesFromANumberOnAndAnEndMarker) {
  auto publisher = StartPublisher({.endpoint = IpcEndpoint("pub"),
                                   .replay_endpoint = IpcEndpoint("replay"),
                                   .buffer_steps = 6,
                                   .topic = "t"});
  Subscriber subscriber(*publisher, "t");
  const uint64_t next = AwaitSubscription(*publisher, subscriber);
  std::vector<std::string> live;
  for (int i = 0; i < 10; ++i) publisher->Publish(StoredChain(2, 4, 10 * i));
  for (int i = 0; i < 10; ++i) {
    const std::optional<Message> message = subscriber.Receive();
    ASSERT_TRUE(message) << i;
    live.push_back(message->payload);
  }

  const std::vector<Message> last = subscriber.Replay(next + 8);
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last[0].sequence, next + 8);
  EXPECT_EQ(last[0].topic, "t");
  EXPECT_EQ(last[0].payload, live[8]);
  EXPECT_EQ(last[1].payload, live[9]);

  const std::vector<Message> all = subscriber.Replay(0);  // the buffer holds six
  ASSERT_EQ(all.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(all[i].sequence, next + 4 + i);
    EXPECT_EQ(all[i].payload, live[4 + i]);
  }
  EXPECT_TRUE(subscriber.Replay(next + 10).empty());

  // What is no request is ignored, and the next one answered.
  subscriber.SendReplay({"", "123"});
  subscriber.SendReplay({Subscriber::Big(0)});
  subscriber.SendReplay({"", Subscriber::Big(0), "more"});
  EXPECT_EQ(subscriber.Replay(next + 9).size(), 1u);
  EXPECT_EQ(publisher->stats().replays, 4u);
  for (uint64_t i = 1; i <= 100; ++i) {  // who has the answer finds it counted
    ASSERT_TRUE(subscriber.Replay(next + 10).empty());
    ASSERT_EQ(publisher->stats().replays, 4 + i);
  }
}

TEST(KvEvents, AFullQueueDropsCountsAndLeavesAGap) {
  auto publisher = StartPublisher({.endpoint = IpcEndpoint("full"),
                                   .replay_endpoint = IpcEndpoint("full-replay"),
                                   .max_queue_size = 1});
  // Encoding such a batch takes the thread far longer than handing it over takes this one.
  const std::vector<CacheEvent> large = StoredChain(100, 256, 0);
  uint64_t published = 0;
  while (publisher->stats().dropped_batches == 0 && published < 100'000) {
    publisher->Publish(large);
    ++published;
  }
  KvEventPublisher::Stats stats;
  do {
    stats = publisher->stats();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (stats.batches + stats.dropped_batches < published);
  EXPECT_EQ(stats.dropped_batches, 1u);
  EXPECT_EQ(stats.dropped_events, 100u);
  publisher->Publish(StoredChain(1, 4, 0));
  Subscriber subscriber(*publisher);
  std::vector<Message> all;
  do {
    all = subscriber.Replay(0);
  } while (all.empty() || all.back().sequence != published);
  ASSERT_EQ(all.size(), stats.batches + 1);
  EXPECT_EQ(all[all.size() - 2].sequence, published - 2);  // published - 1 is the one dropped
}

TEST(KvEvents, WhatIsQueuedIsSentBeforeClosing) {
  auto publisher = StartPublisher({.endpoint = "tcp://127.0.0.1:*"});
  Subscriber subscriber(*publisher);
  AwaitSubscription(*publisher, subscriber);
  for (int i = 0; i < 20; ++i) publisher->Publish(StoredChain(20, 256, i));
  publisher.reset();
  for (int i = 0; i < 20; ++i) {
    const std::optional<Message> message = subscriber.Receive();
    ASSERT_TRUE(message) << i;
    EXPECT_EQ(message->batch()[1][0]["token_ids"][0], i);
  }
}

TEST(KvEvents, AnAddressInUseIsNamed) {
  auto publisher = StartPublisher({.endpoint = "tcp://127.0.0.1:*"});
  KvEventsConfig config = *KvEventsConfig::Parse(R"({"enable_kv_cache_events": true})");
  config.endpoint = IpcEndpoint("free");
  config.replay_endpoint = publisher->endpoint();
  const auto second = KvEventPublisher::Start(config, Format());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::kUnavailable);
  EXPECT_THAT(second.error().message, HasSubstr(publisher->endpoint()));
}

TEST(KvEvents, APlainAddressIsConnectedTo) {
  zmq::context_t context;
  zmq::socket_t collector(context, zmq::socket_type::sub);
  collector.set(zmq::sockopt::subscribe, "");
  collector.set(zmq::sockopt::rcvtimeo, 50);
  collector.bind("tcp://127.0.0.1:*");
  auto publisher = StartPublisher({.endpoint = collector.get(zmq::sockopt::last_endpoint)});
  zmq::message_t topic;
  bool arrived = false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (!arrived && std::chrono::steady_clock::now() < end) {
    publisher->Publish({{.kind = CacheEvent::Kind::kCleared}});
    arrived = collector.recv(topic).has_value();
  }
  EXPECT_TRUE(arrived);
}

}  // namespace
}  // namespace fathom
