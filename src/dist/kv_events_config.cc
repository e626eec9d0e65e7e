#include "dist/kv_events_config.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr char kFlag[] = "--kv-events-config";
// No buffer of batches grows beyond this many, whatever is asked for.
constexpr int64_t kMostBatches = 10'000'000;

template <class... Args>
tl::unexpected<Error> Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return FailParam(Code::kInvalidArgument, kFlag, "{}: {}", kFlag,
                   fmt::format(format, std::forward<Args>(args)...));
}

Status ReadText(const json& value, const std::string& key, std::string* out) {
  if (!value.is_string()) return Refuse("{} must be a string, not {}", key, ShortJson(value));
  *out = value.get<std::string>();
  return {};
}

Status ReadCount(const json& value, const std::string& key, int64_t low, int64_t* out) {
  if (!value.is_number_integer() || value < low || value > kMostBatches) {
    return Refuse("{} must be an integer from {} to {}, not {}", key, low, kMostBatches,
                  ShortJson(value));
  }
  *out = value.get<int64_t>();
  return {};
}

bool StartsWith(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

// ZeroMQ takes any number for a port and drops its upper bits.
Status CheckPort(const std::string& endpoint, const char* key, bool binds) {
  const size_t colon = endpoint.rfind(':');
  const std::string_view port = std::string_view(endpoint).substr(colon + 1);
  if (colon < std::string_view("tcp://").size()) {
    return Refuse("{} '{}' has no port", key, endpoint);
  }
  if (binds && port == "*") return {};
  int64_t number = -1;
  const auto [rest, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  const bool whole = error == std::errc() && rest == port.data() + port.size();
  const int64_t low = binds ? 0 : 1;
  if (whole && number >= low && number <= 65'535) return {};
  return Refuse("{} '{}': the port '{}' is no number from {} to 65535{}", key, endpoint, port, low,
                binds ? " (0 or *: a free one)" : "");
}

Status CheckEndpoint(const std::string& endpoint, const char* key, bool binds) {
  for (const std::string_view scheme : {"tcp://", "ipc://", "inproc://"}) {
    if (!StartsWith(endpoint, scheme) || endpoint.size() == scheme.size()) continue;
    return scheme == "tcp://" ? CheckPort(endpoint, key, binds) : Status{};
  }
  return Refuse("{} '{}' is not an address like tcp://*:5557, ipc:///PATH or inproc://NAME", key,
                endpoint);
}

Status ReadKey(const std::string& key, const json& value, KvEventsConfig* config) {
  if (key == "enable_kv_cache_events") {
    if (!value.is_boolean()) {
      return Refuse("{} must be true or false, not {}", key, ShortJson(value));
    }
    config->enable_kv_cache_events = value.get<bool>();
    return {};
  }
  if (key == "publisher") {
    if (value.is_null()) return {};
    FATHOM_TRY(ReadText(value, key, &config->publisher));
    if (config->publisher == "zmq" || config->publisher == "null") return {};
    return Refuse("{} must be \"zmq\" or \"null\", not {}", key, ShortJson(value));
  }
  if (key == "encoding") {
    std::string name;
    FATHOM_TRY(ReadText(value, key, &name));
    if (name != "map" && name != "array") {
      return Refuse("{} must be \"map\" or \"array\", not {}", key, ShortJson(value));
    }
    config->encoding = name == "map" ? KvEventEncoding::kMap : KvEventEncoding::kArray;
    return {};
  }
  if (key == "endpoint") return ReadText(value, key, &config->endpoint);
  if (key == "replay_endpoint") {
    if (value.is_null()) return {};
    FATHOM_TRY(ReadText(value, key, &config->replay_endpoint));
    return CheckEndpoint(config->replay_endpoint, "replay_endpoint", true);
  }
  if (key == "topic") return ReadText(value, key, &config->topic);
  if (key == "buffer_steps") return ReadCount(value, key, 0, &config->buffer_steps);
  if (key == "hwm") return ReadCount(value, key, 1, &config->hwm);
  if (key == "max_queue_size") return ReadCount(value, key, 1, &config->max_queue_size);
  return Refuse(
      "'{}' is unknown; known are enable_kv_cache_events, publisher, endpoint, replay_endpoint, "
      "buffer_steps, hwm, max_queue_size, topic and encoding",
      key);
}

}  // namespace

Expected<KvEventsConfig> KvEventsConfig::Parse(std::string_view text) {
  Expected<json> object = ParseStrictJson(text, kFlag);
  if (!object) {
    object.error().param = kFlag;
    return tl::unexpected<Error>(std::move(object.error()));
  }
  if (!object->is_object()) return Refuse("must be a JSON object, not {}", ShortJson(*object));
  KvEventsConfig config;
  for (const auto& [key, value] : object->items()) FATHOM_TRY(ReadKey(key, value, &config));
  FATHOM_TRY(CheckEndpoint(config.endpoint, "endpoint", BindsEndpoint(config.endpoint)));
  if (config.publisher.empty()) config.publisher = config.enable_kv_cache_events ? "zmq" : "null";
  return config;
}

bool BindsEndpoint(std::string_view endpoint) {
  return endpoint.find('*') != std::string_view::npos ||
         endpoint.find("::") != std::string_view::npos || StartsWith(endpoint, "ipc://") ||
         StartsWith(endpoint, "inproc://");
}

}  // namespace fathom
