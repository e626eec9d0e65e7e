#include "dist/kv_events_config.h"

#include <gmock/gmock.h>

namespace fathom {
namespace {

using testing::HasSubstr;

std::string ErrorOf(std::string_view text) {
  const auto config = KvEventsConfig::Parse(text);
  if (config) return "accepted";
  EXPECT_EQ(config.error().code, Code::kInvalidArgument);
  EXPECT_EQ(config.error().param, "--kv-events-config");
  return config.error().message;
}

TEST(KvEventsConfig, DefaultsAreVllms) {
  const KvEventsConfig off = *KvEventsConfig::Parse("{}");
  EXPECT_FALSE(off.publishes());
  const KvEventsConfig on = *KvEventsConfig::Parse(R"({"enable_kv_cache_events": true})");
  EXPECT_TRUE(on.publishes());
  EXPECT_EQ(on.publisher, "zmq");
  EXPECT_EQ(on.endpoint, "tcp://*:5557");
  EXPECT_EQ(on.replay_endpoint, "");
  EXPECT_EQ(on.buffer_steps, 10'000);
  EXPECT_EQ(on.hwm, 100'000);
  EXPECT_EQ(on.max_queue_size, 100'000);
  EXPECT_EQ(on.topic, "");
  EXPECT_EQ(on.encoding, KvEventEncoding::kMap);
}

TEST(KvEventsConfig, EveryKeyIsRead) {
  const KvEventsConfig config = *KvEventsConfig::Parse(
      R"({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc:///tmp/events",
          "replay_endpoint": "tcp://*:5558", "buffer_steps": 7, "hwm": 8, "max_queue_size": 9,
          "topic": "kv@node", "encoding": "array"})");
  EXPECT_EQ(config.endpoint, "ipc:///tmp/events");
  EXPECT_EQ(config.replay_endpoint, "tcp://*:5558");
  EXPECT_EQ(config.buffer_steps, 7);
  EXPECT_EQ(config.hwm, 8);
  EXPECT_EQ(config.max_queue_size, 9);
  EXPECT_EQ(config.topic, "kv@node");
  EXPECT_EQ(config.encoding, KvEventEncoding::kArray);
}

TEST(KvEventsConfig, TheNullPublisherIsOff) {
  const auto config =
      KvEventsConfig::Parse(R"({"enable_kv_cache_events": true, "publisher": "null"})");
  EXPECT_FALSE(config->publishes());
  const auto replay = KvEventsConfig::Parse(R"({"replay_endpoint": null, "publisher": null})");
  EXPECT_TRUE(replay) << replay.error().message;
}

TEST(KvEventsConfig, MistakesNameTheKey) {
  EXPECT_THAT(ErrorOf("{"), HasSubstr("--kv-events-config"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("must be a JSON object"));
  EXPECT_THAT(ErrorOf(R"({"endpont": "tcp://*:5557"})"), HasSubstr("'endpont' is unknown"));
  EXPECT_THAT(ErrorOf(R"({"enable_kv_cache_events": 1})"), HasSubstr("enable_kv_cache_events"));
  EXPECT_THAT(ErrorOf(R"({"publisher": "kafka"})"), HasSubstr("publisher"));
  EXPECT_THAT(ErrorOf(R"({"publisher": true})"), HasSubstr("publisher"));
  EXPECT_THAT(ErrorOf(R"({"endpoint": 5557})"), HasSubstr("endpoint must be a string"));
  EXPECT_THAT(ErrorOf(R"({"endpoint": "localhost:5557"})"), HasSubstr("'localhost:5557'"));
  EXPECT_THAT(ErrorOf(R"({"replay_endpoint": "udp://x"})"), HasSubstr("replay_endpoint"));
  EXPECT_THAT(ErrorOf(R"({"buffer_steps": -1})"), HasSubstr("buffer_steps"));
  EXPECT_THAT(ErrorOf(R"({"buffer_steps": 1.5})"), HasSubstr("buffer_steps"));
  EXPECT_THAT(ErrorOf(R"({"hwm": 0})"), HasSubstr("hwm"));
  EXPECT_THAT(ErrorOf(R"({"max_queue_size": "1"})"), HasSubstr("max_queue_size"));
  EXPECT_THAT(ErrorOf(R"({"topic": null})"), HasSubstr("topic"));
  EXPECT_THAT(ErrorOf(R"({"encoding": "json"})"), HasSubstr("encoding"));
  EXPECT_THAT(ErrorOf(R"({"topic": "a", "topic": "b"})"), HasSubstr("topic"));
}

TEST(KvEventsConfig, PortsThatAreNoneAreRefused) {
  const auto error = [](const std::string& key, const std::string& address) {
    return ErrorOf(fmt::format(R"({{"{}": "{}"}})", key, address));
  };
  for (const char* key : {"endpoint", "replay_endpoint"}) {
    for (const char* port :
         {"99999", "65536", "-1", "http", "5557x", "", " 1", "0x10", "99999999999999999999"}) {
      const std::string address = fmt::format("tcp://*:{}", port);
      EXPECT_THAT(error(key, address),
                  HasSubstr(fmt::format("--kv-events-config: {} '{}': the port '{}' is no number "
                                        "from 0 to 65535",
                                        key, address, port)));
    }
    EXPECT_THAT(error(key, "tcp://*"), HasSubstr("has no port"));
    for (const char* address : {"tcp://*:65535", "tcp://*:0", "tcp://*:*", "tcp://[::1]:5557",
                                "ipc:///tmp/a:99999", "inproc://a:99999"}) {
      EXPECT_EQ(error(key, address), "accepted") << address;
    }
  }
  // What is connected to has a port of its own.
  EXPECT_THAT(error("endpoint", "tcp://router:0"), HasSubstr("from 1 to 65535"));
  EXPECT_THAT(error("endpoint", "tcp://router:99999"), HasSubstr("from 1 to 65535"));
  EXPECT_THAT(error("endpoint", "tcp://router"), HasSubstr("has no port"));
  EXPECT_EQ(error("endpoint", "tcp://router:5557"), "accepted");
  EXPECT_EQ(error("replay_endpoint", "tcp://127.0.0.1:*"), "accepted");  // always bound
}

TEST(KvEventsConfig, WildcardsAreBoundAndNamesConnected) {
  EXPECT_TRUE(BindsEndpoint("tcp://*:5557"));
  EXPECT_TRUE(BindsEndpoint("tcp://[::]:5557"));
  EXPECT_TRUE(BindsEndpoint("ipc:///tmp/events"));
  EXPECT_TRUE(BindsEndpoint("inproc://events"));
  EXPECT_FALSE(BindsEndpoint("tcp://router:5557"));
}

}  // namespace
}  // namespace fathom
