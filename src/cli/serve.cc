#include "cli/serve.h"

#include <unistd.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "api/openai_request.h"
#include "api/server.h"
#include "core/log.h"
#include "core/stderr_print.h"
#include "dist/kv_events.h"

namespace fathom {
namespace {

using std::chrono::milliseconds;

milliseconds Milliseconds(double seconds) {
  return milliseconds(static_cast<int64_t>(seconds * 1000));
}

// tokenizer_config.json's add_bos_token; a missing file or key means no.
// add_bos_token of tokenizer_config.json; false where the file or the key is missing.
Expected<bool> AddsBos(const std::string& directory) {
  const std::string path = directory + "/tokenizer_config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return false;
  std::ifstream file(path, std::ios::binary);
  const nlohmann::json config = nlohmann::json::parse(file, nullptr, false);
  if (!config.is_object()) {
    return Fail(Code::kInvalidArgument, "{}: not a JSON object", path);
  }
  const auto flag = config.find("add_bos_token");
  if (flag == config.end() || flag->is_null()) return false;
  if (!flag->is_boolean()) {
    return Fail(Code::kInvalidArgument, "{}: add_bos_token must be true or false", path);
  }
  return flag->get<bool>();
}

Expected<bool> DefaultThinking(const std::string& kwargs) {
  constexpr char kFlag[] = "--default-chat-template-kwargs";
  if (kwargs.empty()) return false;
  const nlohmann::json object = nlohmann::json::parse(kwargs, nullptr, false);
  if (!object.is_object()) {
    return FailParam(Code::kInvalidArgument, kFlag, "{} must be a JSON object, not '{}'", kFlag,
                     kwargs);
  }
  for (const auto& [key, value] : object.items()) {
    if (key == "thinking" || key == "enable_thinking") continue;
    return FailParam(Code::kInvalidArgument, kFlag,
                     "{}: '{}' is unknown; known are thinking and enable_thinking", kFlag, key);
  }
  FATHOM_ASSIGN(const std::optional<bool> thinking,
                ThinkingSwitch(object, fmt::format("{}: ", kFlag)));
  return thinking.value_or(false);
}

Expected<ServedModel> MakeServedModel(const ServeOptions& options) {
  ServedModel model;
  FATHOM_ASSIGN(model.default_thinking, DefaultThinking(options.default_chat_template_kwargs));
  if (options.thinking_sampling == "ignore") model.thinking_sampling = ThinkingSampling::kIgnore;
  else if (options.thinking_sampling != "apply")
    return FailParam(Code::kInvalidArgument, "--thinking-sampling",
                     "--thinking-sampling '{}' is not one of apply, ignore",
                     options.thinking_sampling);
  model.names = options.served_model_names;
  if (model.names.empty()) {
    const std::string& given = options.runtime.model;
    model.names.push_back(given.empty() ? "demo" : given);
  }
  return model;
}

ServerOptions MakeServerOptions(const ServeOptions& options) {
  ServerOptions server;
  server.host = options.host;
  server.port = options.port;
  server.http_threads = options.http_threads;
  server.api_keys = options.api_keys;
  server.allowed_origins = options.allowed_origins;
  server.metrics_prefix = options.metrics_prefix;
  server.limits.body_bytes = static_cast<uint64_t>(options.max_body_bytes);
  server.heartbeat = Milliseconds(options.heartbeat_seconds);
  server.unhealthy_after = Milliseconds(options.unhealthy_seconds);
  server.stall_limit = Milliseconds(options.stall_seconds);
  return server;
}

Status CheckOptions(const ServeOptions& options) {
  const auto positive = [](const char* flag, double value) -> Status {
    if (value > 0) return {};
    return FailParam(Code::kInvalidArgument, flag, "{} must be more than 0, not {}", flag, value);
  };
  FATHOM_TRY(positive("--http-threads", options.http_threads));
  FATHOM_TRY(positive("--max-body-size", static_cast<double>(options.max_body_bytes)));
  FATHOM_TRY(positive("--heartbeat-seconds", options.heartbeat_seconds));
  FATHOM_TRY(positive("--unhealthy-seconds", options.unhealthy_seconds));
  FATHOM_TRY(positive("--stall-seconds", options.stall_seconds));
  // What Prometheus allows in a metric's name.
  const std::string& prefix = options.metrics_prefix;
  for (size_t i = 0; i < prefix.size(); ++i) {
    const char c = prefix[i];
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == ':';
    if (letter || (i > 0 && c >= '0' && c <= '9')) continue;
    return FailParam(Code::kInvalidArgument, "--metrics-prefix",
                     "--metrics-prefix '{}' may hold letters, digits, '_' and ':', and not begin "
                     "with a digit",
                     prefix);
  }
  return {};
}

// Fails when the server could not listen, before minutes go into loading weights. The socket is
// given back: a server listens only when it can answer.
Status TryToListen(const ServeOptions& options) {
  using boost::asio::ip::tcp;
  boost::system::error_code error;
  boost::asio::io_context io;
  tcp::resolver resolver(io);
  std::string name = options.host;
  if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
    name = name.substr(1, name.size() - 2);
  }
  const auto found = resolver.resolve(name, std::to_string(options.port), error);
  if (error || found.empty()) {
    return FailParam(Code::kInvalidArgument, "--host", "--host '{}': {}", options.host,
                     error.message());
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor acceptor(io);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(1, error);
  if (!error) return {};
  return FailParam(Code::kUnavailable, "--port", "cannot listen on {}:{}: {}", options.host,
                   options.port, error.message());
}

// The host part of a URL a person can open.
std::string ShownHost(const std::string& host) {
  if (host == "0.0.0.0") return "127.0.0.1";
  if (host == "::" || host == "[::]") return "[::1]";
  return host.find(':') != std::string::npos && host.front() != '[' ? "[" + host + "]" : host;
}

// The publisher that --kv-events-config asks for, null where it asks for none. Its counters go to
// the metrics of `model`.
Expected<std::shared_ptr<KvEventPublisher>> StartKvEvents(const ServeOptions& options,
                                                          ServedModel* model) {
  std::shared_ptr<KvEventPublisher> publisher;
  if (options.kv_events_config.empty()) return publisher;
  FATHOM_ASSIGN(const KvEventsConfig config, KvEventsConfig::Parse(options.kv_events_config));
  if (!config.publishes()) return publisher;
  KvEventFormat format;
  format.block_tokens = options.runtime.block_size;
  format.common_root =
      BlockHasher(options.runtime.reuse.prefix_hash == "sha256" ? HashAlgorithm::kSha256
                                                                : HashAlgorithm::kXxh3)
          .Root("");
  FATHOM_ASSIGN(publisher, KvEventPublisher::Start(config, format));
  const auto count = [&](const char* name, const char* help, auto field) {
    model->counters.push_back({name, help, [publisher, field] {
                                 return static_cast<double>(publisher->stats().*field);
                               }});
  };
  using Stats = KvEventPublisher::Stats;
  count("kv_event_batches_total", "Batches of KV events published.", &Stats::batches);
  count("kv_events_total", "KV events published.", &Stats::events);
  count("kv_event_batches_dropped_total", "Batches of KV events the full queue lost.",
        &Stats::dropped_batches);
  count("kv_event_replays_total", "Replays of KV events answered.", &Stats::replays);
  return publisher;
}

// Runs in a thread of its own from before the model is loaded, so that a signal during the load
// ends the process instead of waiting for it.
class Signals {
 public:
  Signals() : set_(io_, SIGTERM, SIGINT) {
    Wait();
    thread_ = std::thread([this] { io_.run(); });
  }
  ~Signals() {
    io_.stop();
    thread_.join();
  }
  // From now on the first signal only sets requested().
  void Serving() { serving_ = true; }
  bool requested() const { return requested_; }

 private:
  void Wait() {
    set_.async_wait([this](const boost::system::error_code& error, int signal) {
      if (error) return;
      if (!serving_ || requested_) _exit(128 + signal);
      requested_ = true;
      Wait();
    });
  }

  boost::asio::io_context io_{1};
  boost::asio::signal_set set_;
  std::atomic<bool> serving_{false}, requested_{false};
  std::thread thread_;
};

}  // namespace

Status RunServe(const ServeOptions& options) {
  std::signal(SIGPIPE, SIG_IGN);  // whoever read the messages may go: the server stays
  FATHOM_TRY(CheckOptions(options));
  FATHOM_ASSIGN(ServedModel model, MakeServedModel(options));
  Signals signals;
  FATHOM_TRY(TryToListen(options));
  const auto start = std::chrono::steady_clock::now();
  RuntimeOptions runtime_options = options.runtime;
  FATHOM_ASSIGN(const std::shared_ptr<KvEventPublisher> kv_events, StartKvEvents(options, &model));
  runtime_options.reuse.events = kv_events;
  FATHOM_ASSIGN(const std::unique_ptr<Runtime> runtime, LoadRuntime(runtime_options));
  model.engine = runtime->engine.get();
  model.tokenizer = runtime->tokenizer.get();
  model.encoder = runtime->encoder.get();
  model.root = runtime->directory;
  model.max_model_len = runtime->engine_options.max_model_len;
  model.defaults = runtime->defaults;
  FATHOM_ASSIGN(model.add_bos, AddsBos(runtime->directory));
  std::string names;
  for (const std::string& name : model.names) names += (names.empty() ? "" : ", ") + name;
  const bool thinking = model.default_thinking;

  for (const std::string& notice : options.notices) PrintStderr("fathom: {}\n", notice);
  PrintStderr("{}", DescribeRuntime(*runtime));
  PrintStderr("  {:<16} {}; thinking by default: {}\n", "served as", names,
              thinking ? "yes" : "no");
  if (kv_events != nullptr) {
    const std::string& replay = kv_events->replay_endpoint();
    PrintStderr("  {:<16} {}, replay: {}\n", "KV events", kv_events->endpoint(),
                replay.empty() ? "none" : replay);
  }
  FATHOM_ASSIGN(const std::unique_ptr<Server> server,
                Server::Start(MakeServerOptions(options), std::move(model)));
  signals.Serving();
  PrintStderr("fathom: ready at http://{}:{} after {:.1f} s\n", ShownHost(options.host),
              server->port(),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());

  while (!signals.requested()) std::this_thread::sleep_for(milliseconds(50));
  PrintStderr("fathom: finishing the running requests; a second signal ends at once\n");
  server->BeginDrain();
  while (!server->WaitDrained(milliseconds(200))) {
  }
  PrintStderr("fathom: done\n");
  return {};
}

}  // namespace fathom
