// The server over real sockets with a scripted model: routes, protocol errors, streams,
// disconnects, overload, drain.
#include "api/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/base_sink.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "api/testing_client.h"
#include "api/testing_model.h"
#include "core/log.h"

namespace fathom {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using testing::EventData;
using testing::FakeModel;
using testing::FakeModelOptions;
using testing::PostText;
using testing::RawClient;
using testing::RawReply;

constexpr char kChat[] = "/v1/chat/completions";

// Holds the engine before its steps: lets as many pass as are allowed, or all while it is open.
class StepGate {
 public:
  Status Pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_ || allowed_ > 0; });
    if (!open_) --allowed_;
    return {};
  }
  void Allow(int steps) {
    const std::lock_guard lock(mutex_);
    allowed_ += steps;
    changed_.notify_all();
  }
  void Open() { Set(true); }
  void Close() { Set(false); }

 private:
  void Set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int allowed_ = 0;
};

// Polls until the condition holds; false: it never did.
template <class Condition>
bool WaitFor(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + testing::kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

class ServerTest : public ::testing::Test {
 protected:
  ~ServerTest() override { gate_->Open(); }  // an engine that is held could not end

  void Start(FakeModelOptions model = {}, ServerOptions options = {}) {
    model_ = std::make_unique<FakeModel>(std::move(model));
    options.host = "127.0.0.1";
    options.port = 0;
    auto server = Server::Start(options, model_->served);
    ASSERT_TRUE(server) << server.error().message;
    server_ = std::move(*server);
  }
  RawReply Post(std::string_view path, const json& body, std::string_view headers = "") {
    RawClient client(server_->port());
    client.Send(PostText(path, body.dump(), headers));
    return client.ReadReply();
  }
  RawReply Raw(std::string_view request) {
    RawClient client(server_->port());
    client.Send(request);
    return client.ReadReply();
  }
  RawReply Get(std::string_view path) {
    return Raw("GET " + std::string(path) + " HTTP/1.1\r\nHost: t\r\n\r\n");
  }
  static json Chat(const std::string& text, json extra = json::object()) {
    json body = {{"messages", json::array({{{"role", "user"}, {"content", text}}})}};
    body.update(extra);
    return body;
  }
  // Pools and queue back to empty (I7).
  void ExpectIdle() {
    // Generous: a slow reader is cut only when the kernel's buffers (megabytes) are full.
    // A request whose client has left may still be on its way to the engine when that is idle.
    EngineStats stats;
    const auto all_returned = [&] {
      stats = model_->engine->stats();
      return stats.running + stats.waiting + stats.blocks_used + stats.slots_used == 0;
    };
    ASSERT_TRUE(model_->engine->WaitIdle(testing::kPatience));
    EXPECT_TRUE(WaitFor(all_returned))
        << stats.running << " running, " << stats.waiting << " waiting, " << stats.blocks_used
        << " blocks and " << stats.slots_used << " slots used";
  }

  // Runs on without end, slowly.
  static FakeModelOptions Endless(int step_ms = 2) {
    FakeModelOptions model;
    model.next_token = [](auto) { return TokenId{'a'}; };
    model.on_step = [step_ms]() -> Status {
      std::this_thread::sleep_for(milliseconds(step_ms));
      return {};
    };
    return model;
  }

  // Runs on without end, where gate_ lets it.
  FakeModelOptions Gated() {
    FakeModelOptions model;
    model.next_token = [](auto) { return TokenId{'a'}; };
    model.on_step = [gate = gate_] { return gate->Pass(); };
    return model;
  }

  const std::shared_ptr<StepGate> gate_ = std::make_shared<StepGate>();
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<Server> server_;
};

TEST_F(ServerTest, ShortRoutes) {
  Start();
  EXPECT_EQ(Get("/health").status, 200);
  EXPECT_NE(Get("/health").head.find("\r\nDate: "), std::string::npos);
  EXPECT_EQ(HttpDate(784111777), "Sun, 06 Nov 1994 08:49:37 GMT");
  EXPECT_EQ(Get("/ping").status, 200);
  EXPECT_EQ(json::parse(Get("/load").body)["server_load"], 0);
  EXPECT_TRUE(json::parse(Get("/version").body).contains("version"));
  const json models = json::parse(Get("/v1/models").body);
  EXPECT_EQ(models["data"].size(), 2u);
  EXPECT_EQ(models["data"][0]["id"], "fake");
  EXPECT_EQ(models["data"][0]["max_model_len"], 65536);
  EXPECT_EQ(json::parse(Get("/v1/models/alias").body)["id"], "alias");
  EXPECT_EQ(Get("/v1/models/none").status, 404);
  const RawReply metrics = Get("/metrics");
  for (const char* name :
       {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket", "vllm:request_success_total",
        "vllm:pool_units_used", "vllm:oldest_waiting_seconds"}) {
    EXPECT_NE(metrics.body.find(name), std::string::npos) << name;
  }
}

// Collects what is logged at `level` and above.
class LogCapture {
 public:
  explicit LogCapture(spdlog::level::level_enum level) : before_(Log().level()) {
    sink_->set_pattern("%l %v");
    Log().sinks().push_back(sink_);
    Log().set_level(level);
  }
  ~LogCapture() {
    Log().set_level(before_);
    Log().sinks().pop_back();
  }
  LogCapture(const LogCapture&) = delete;
  std::string text() const { return sink_->text(); }

 private:
  // May be read while others write.
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    std::string text() {
      const std::lock_guard lock(mutex_);
      return text_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      spdlog::memory_buf_t line;
      formatter_->format(message, line);
      text_.append(line.data(), line.size());
    }
    void flush_() override {}
    std::string text_;
  };

  const std::shared_ptr<Sink> sink_ = std::make_shared<Sink>();
  spdlog::level::level_enum before_;
};

TEST_F(ServerTest, LogsRequestsRefusalsAndThroughput) {
  const LogCapture log(spdlog::level::debug);
  ServerOptions options;
  options.log_interval = milliseconds(5);
  Start(Endless(), options);
  EXPECT_EQ(Post(kChat, Chat("hi", {{"max_tokens", 20}}), "X-Request-Id: r-1\r\n").status, 200);
  EXPECT_EQ(Post(kChat, Chat("hi", {{"temperature", 9}}), "X-Request-Id: r-2\r\n").status, 400);
  Raw("GET /nothing HTTP/1.1\r\nX-Request-Id: r-3\r\n\r\n");
  EXPECT_EQ(Post("/v1/completions", {{"prompt", "ab"}, {"max_tokens", 3}, {"stream", true}},
                 "X-Request-Id: r-4\r\n")
                .status,
            200);
  {
    RawClient client(server_->port());
    client.Send(PostText(kChat, Chat("goes on", {{"stream", true}}).dump()));
    const auto throughput = ::testing::ContainsRegex(
        "info prompt [0-9.]+ tokens/s and [0-9.]+ cached, generation [0-9.]+ tokens/s, running 1, "
        "waiting 0, blocks [1-9]");
    EXPECT_TRUE(WaitFor([&] { return ::testing::Value(log.text(), throughput); })) << log.text();
  }
  ExpectIdle();
  server_.reset();  // its threads have logged what they had to
  const std::string text = log.text();
  EXPECT_THAT(text,
              ::testing::ContainsRegex(
                  "info request r-1 /v1/chat/completions: prompt [0-9]+ tokens \\(0 "
                  "cached\\), completion 20, first token [0-9]+[.][0-9]+ s, [0-9.]+ tokens/s, "
                  "finish length, status 200\n"));
  EXPECT_THAT(
      text, ::testing::HasSubstr("debug request r-2 refused: status 400, code invalid_value, param "
                                 "temperature\n"));
  EXPECT_THAT(text, ::testing::HasSubstr(
                        "debug request r-3 refused: status 404, code not_found, param none\n"));
  EXPECT_THAT(text, ::testing::HasSubstr("info request r-4 /v1/completions: prompt 2 tokens"));
}

TEST_F(ServerTest, DecodeTimesAreObservedPerChoice) {
  Start(Endless());
  EXPECT_EQ(Post(kChat, Chat("hi", {{"max_tokens", 5}, {"n", 2}})).status, 200);
  EXPECT_EQ(Post(kChat, Chat("hi", {{"max_tokens", 1}})).status, 200);
  ExpectIdle();
  const std::string text = Get("/metrics").body;
  const auto count = [&](const std::string& name) {
    const size_t at = text.find("\n" + name + "_count{");
    return at == text.npos ? -1 : std::stoi(text.substr(text.find("} ", at) + 2));
  };
  EXPECT_EQ(count("vllm:request_decode_time_seconds"), 3);
  EXPECT_EQ(count("vllm:request_time_per_output_token_seconds"), 2);  // one token has no rate
}

TEST_F(ServerTest, TokenizeRoundTrip) {
  Start();
  const json tokens =
      json::parse(Post("/tokenize", {{"prompt", "héllo"}, {"return_token_strs", true}}).body);
  EXPECT_EQ(tokens["count"], 6);
  EXPECT_EQ(tokens["max_model_len"], 65536);
  EXPECT_EQ(tokens["token_strs"].size(), 6u);
  const json text = json::parse(Post("/detokenize", {{"tokens", tokens["tokens"]}}).body);
  EXPECT_EQ(text["prompt"], "héllo");
  const json chat = json::parse(Post("/tokenize", Chat("hi")).body);
  EXPECT_TRUE(chat["token_strs"].is_null());
  EXPECT_GT(chat["count"], 3);
}

TEST_F(ServerTest, ProtocolErrorsAreJson) {
  ServerOptions options;
  options.limits.header_bytes = 2048;
  options.limits.body_bytes = 4096;
  Start({}, options);
  const std::vector<std::pair<std::string, int>> cases = {
      {"GET /nothing HTTP/1.1\r\n\r\n", 404},
      {"GET /v1/chat/completions HTTP/1.1\r\n\r\n", 405},
      {"DELETE /health HTTP/1.1\r\n\r\n", 405},
      {"\x01\x02\x03 garbage\r\n\r\n", 400},
      {"GET /health HTTP/9.9\r\n\r\n", 505},
      {"GET /health\r\n\r\n", 400},
      {"POST /v1/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n", 400},
      {"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400},
      {"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413},
      {"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400},
      // Where the body ends is unknown, so what follows must not be run as a request.
      {"GET /health HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\nGET /version HTTP/1.1\r\n\r\n",
       501},
      {"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501},
      {"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n21;" +
           std::string(2 << 20, 'a'),
       431},
      {"GET /health HTTP/1.1\r\nX: " + std::string(5000, 'a') + "\r\n\r\n", 431},
      {"POST /v1/completions HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
       415},
      {PostText("/v1/completions", "{"), 400},
      {PostText("/v1/completions", "\xff\xfe"), 400},
      {PostText(kChat, "[]"), 400},
      {PostText(kChat, "{}"), 400},
  };
  for (const auto& [request, status] : cases) {
    const RawReply reply = Raw(request);
    EXPECT_EQ(reply.status, status) << request.substr(0, 60) << "\n" << reply.head << reply.body;
    const json body = json::parse(reply.body, nullptr, false);
    ASSERT_TRUE(body.is_object()) << request.substr(0, 60);
    for (const char* key : {"message", "type", "param", "code"}) {
      EXPECT_TRUE(body["error"].contains(key)) << key;
    }
  }
  EXPECT_EQ(Get("/health").status, 200);
}

TEST_F(ServerTest, HeadOptionsAndRequestIds) {
  ServerOptions options;
  options.allowed_origins = {"https://a.example"};
  Start({}, options);
  RawClient client(server_->port());
  client.Send(
      "HEAD /v1/models HTTP/1.1\r\nX-Request-Id: abc-1\r\nOrigin: https://a.example\r\n\r\n");
  const std::string head = client.ReadUntil("\r\n\r\n");
  EXPECT_NE(head.find("200 OK"), std::string::npos);
  EXPECT_NE(head.find("X-Request-Id: abc-1"), std::string::npos);
  EXPECT_NE(head.find("Access-Control-Allow-Origin: https://a.example"), std::string::npos);
  // The reply to HEAD has no body: the next reply follows at once.
  client.Send("OPTIONS /v1/completions HTTP/1.1\r\nOrigin: https://b.example\r\n\r\n");
  const RawReply options_reply = client.ReadReply();
  EXPECT_EQ(options_reply.status, 204);
  EXPECT_NE(options_reply.head.find("Allow: POST"), std::string::npos);
  EXPECT_EQ(options_reply.head.find("Allow-Origin"), std::string::npos);
}

TEST_F(ServerTest, ApiKey) {
  ServerOptions options;
  options.api_keys = {"secret", "other"};
  Start({}, options);
  EXPECT_EQ(Get("/v1/models").status, 401);
  EXPECT_EQ(Get("/health").status, 200);
  for (const char* key : {"secret", "other"}) {
    EXPECT_EQ(Post(kChat, Chat("x"), fmt::format("Authorization: Bearer {}\r\n", key)).status, 200);
  }
  for (const char* header :
       {"", "Authorization: Bearer secre\r\n", "Authorization: Bearer secretx\r\n",
        "Authorization: secret\r\n", "Authorization: Bearer \r\n"}) {
    EXPECT_EQ(Post(kChat, Chat("x"), header).status, 401) << header;
  }
}

TEST_F(ServerTest, PipelinedRequestsAreAnsweredInOrder) {
  Start();
  RawClient client(server_->port());
  std::string requests;
  for (int i = 0; i < 20; ++i) requests += PostText(kChat, Chat(fmt::format("text {}", i)).dump());
  requests += "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n";
  client.Send(requests);
  for (int i = 0; i < 20; ++i) {
    const RawReply reply = client.ReadReply();
    ASSERT_EQ(reply.status, 200) << i;
    EXPECT_EQ(json::parse(reply.body)["choices"][0]["message"]["content"],
              fmt::format("text {}", i));
  }
  EXPECT_NE(client.ReadToEnd().find("Connection: close"), std::string::npos);
}

TEST_F(ServerTest, ExpectContinueIsHonoured) {
  Start();
  RawClient client(server_->port());
  const std::string request = PostText(kChat, Chat("x").dump(), "Expect: 100-continue\r\n");
  const size_t body = request.find("\r\n\r\n") + 4;
  client.Send(request.substr(0, body));
  EXPECT_NE(client.ReadUntil("\r\n\r\n").find("100 Continue"), std::string::npos);
  client.Send(request.substr(body));
  EXPECT_EQ(client.ReadReply().status, 200);
}

TEST_F(ServerTest, StreamAndPlainAgreeOnBothRoutes) {
  FakeModelOptions model;
  model.next_token = FakeModel::Say("héllo 안녕 👩‍👩‍👧!");
  Start(std::move(model));
  const json plain = json::parse(Post(kChat, Chat("q")).body);
  json usage;
  std::string text;
  for (const std::string& event : EventData(
           Post(kChat, Chat("q", {{"stream", true}, {"stream_options", {{"include_usage", true}}}}))
               .body)) {
    if (event == "[DONE]") continue;
    const json chunk = json::parse(event);
    if (chunk["choices"].empty()) usage = chunk["usage"];
    else if (chunk["choices"][0]["delta"].contains("content"))
      text += chunk["choices"][0]["delta"]["content"];
  }
  EXPECT_EQ(plain["choices"][0]["message"]["content"], "héllo 안녕 👩‍👩‍👧!");
  EXPECT_EQ(text, plain["choices"][0]["message"]["content"]);
  EXPECT_EQ(usage, plain["usage"]);
  const json body = {{"prompt", json::array({"a>", "b>"})}, {"n", 2}, {"max_tokens", 100}};
  const json completion = json::parse(Post("/v1/completions", body).body);
  ASSERT_EQ(completion["choices"].size(), 4u);
  for (const json& choice : completion["choices"])
    EXPECT_EQ(choice["text"], "héllo 안녕 👩‍👩‍👧!");
  ExpectIdle();
}

TEST_F(ServerTest, StreamedChoicesEachFinishOnce) {
  Start();
  const json body = Chat("several choices", {{"n", 5}, {"stream", true}});
  std::vector<std::string> text(5);
  std::vector<int> finishes(5);
  for (const std::string& event : EventData(Post(kChat, body).body)) {
    if (event == "[DONE]") continue;
    const json choice = json::parse(event)["choices"][0];
    const size_t index = choice["index"];
    EXPECT_EQ(finishes[index], 0);
    if (choice["delta"].contains("content")) text[index] += choice["delta"]["content"];
    finishes[index] += choice["finish_reason"].is_string();
  }
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(text[i], "several choices");
    EXPECT_EQ(finishes[i], 1);
  }
}

TEST_F(ServerTest, ErrorsBeforeWork) {
  FakeModelOptions model;
  model.engine.max_model_len = 100;
  Start(std::move(model));
  RawReply reply = Post(kChat, Chat("x", {{"model", "gpt-5"}}));
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(json::parse(reply.body)["error"]["code"], "model_not_found");
  reply = Post(kChat, Chat(std::string(200, 'x'), {{"stream", true}}));
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(json::parse(reply.body)["error"]["code"], "context_length_exceeded");
  EXPECT_EQ(json::parse(reply.body)["error"]["param"], "messages");
  for (const char* field : {"max_tokens", "max_completion_tokens"}) {
    reply = Post(kChat, Chat("x", {{field, 100}}));
    EXPECT_EQ(json::parse(reply.body)["error"]["code"], "context_length_exceeded");
    EXPECT_EQ(json::parse(reply.body)["error"]["param"], field);
  }
  reply = Post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 100}});
  EXPECT_EQ(json::parse(reply.body)["error"]["param"], "max_tokens");
  EXPECT_EQ(model_->engine->stats().steps, 0u);
}

TEST_F(ServerTest, QueueFullIs429WithRetryAfter) {
  FakeModelOptions model = Endless();
  model.engine.max_num_seqs = 1;
  model.engine.max_waiting = 2;
  Start(std::move(model));
  std::vector<std::unique_ptr<RawClient>> clients;
  int refused = 0;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(std::make_unique<RawClient>(server_->port()));
    clients.back()->Send(PostText(kChat, Chat("x", {{"stream", true}}).dump()));
    const std::string head = clients.back()->ReadUntil("\r\n\r\n");
    if (head.find(" 429 ") == std::string::npos) continue;
    ++refused;
    EXPECT_NE(head.find("Retry-After: "), std::string::npos);
  }
  EXPECT_GE(refused, 2);
  clients.clear();
  ExpectIdle();
}

TEST_F(ServerTest, MoreChoicesThanTheQueueEverHoldsAreA400) {
  FakeModelOptions model;
  model.engine.max_num_seqs = 4;
  model.engine.max_waiting = 4;
  Start(std::move(model));
  const auto lists = [](size_t count) { return json(std::vector(count, std::vector{5, 6})); };
  const std::tuple<const char*, json, const char*> cases[] = {
      {kChat, Chat("x", {{"n", 5}}), "n"},
      {kChat, Chat("x", {{"n", 128}, {"stream", true}}), "n"},
      {"/v1/completions", {{"prompt", lists(5)}}, "prompt"},
      {"/v1/completions", {{"prompt", lists(5)}, {"n", 2}}, "prompt"},
      {"/v1/completions", {{"prompt", lists(3)}, {"n", 2}}, "n"},
  };
  for (const auto& [path, body, param] : cases) {
    const RawReply reply = Post(path, body);
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_EQ(json::parse(reply.body)["error"]["param"], param);
    EXPECT_THAT(reply.body, ::testing::HasSubstr("the queue holds 4 (--max-waiting)"));
  }
  EXPECT_EQ(model_->engine->stats().steps, 0u);
  // As many as it holds are taken, without luck.
  EXPECT_EQ(Post(kChat, Chat("x", {{"n", 4}})).status, 200);
  ExpectIdle();
  EXPECT_EQ(Post("/v1/completions", {{"prompt", lists(2)}, {"n", 2}}).status, 200);
}

TEST_F(ServerTest, ARequestRefusedForItsChoicesTakesNoPlaceAndIsNotCounted) {
  const LogCapture log(spdlog::level::debug);
  FakeModelOptions model = Endless();
  model.engine.max_num_seqs = 1;
  model.engine.max_waiting = 3;
  Start(std::move(model));
  {
    RawClient running(server_->port()), waiting(server_->port());
    running.Send(PostText(kChat, Chat("x", {{"stream", true}}).dump()));
    running.ReadUntil("\"content\":\"a");
    waiting.Send(PostText(kChat, Chat("x", {{"stream", true}}).dump()));
    waiting.ReadUntil("\r\n\r\n");
    const RawReply refused = Post(kChat, Chat("x", {{"n", 3}}), "X-Request-Id: refused-one\r\n");
    EXPECT_EQ(refused.status, 429);
    EXPECT_NE(refused.head.find("Retry-After: "), std::string::npos);
    EXPECT_EQ(model_->engine->stats().waiting, 1);
    EXPECT_THAT(Get("/metrics").body,
                ::testing::ContainsRegex("finished_reason=\"abort\"[^}]*} 0\n"));
    EXPECT_EQ(Get("/v1/explain/refused-one").status, 404);
  }
  ExpectIdle();
  EXPECT_EQ(model_->engine->stats().finished_cancelled, 2u);
  server_.reset();
  const std::string text = log.text();
  EXPECT_THAT(text, ::testing::HasSubstr("debug request refused-one refused: status 429, code "
                                         "rate_limit_exceeded, param none\n"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("info request refused-one")));
}

TEST_F(ServerTest, DisconnectsCancelWhereverTheyHappen) {
  FakeModelOptions model = Endless(1);
  model.engine.max_num_batched_tokens = 64;  // long prompts take many steps
  model.engine.max_num_seqs = 16;
  Start(std::move(model));
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    const bool stream = random() % 2;
    const size_t length = 1 + random() % 3000;
    const std::string request =
        PostText(kChat, Chat(std::string(length, 'p'), {{"stream", stream}}).dump());
    RawClient client(server_->port());
    client.Send(std::string_view(request).substr(
        0, random() % 4 ? request.size() : random() % request.size()));
    if (random() % 2) std::this_thread::sleep_for(milliseconds(random() % 8));
    if (stream && random() % 3 == 0) client.ReadUntil("\n\n", milliseconds(20));
  }
  ExpectIdle();
  // A request whose client left while it was tokenised never reached the engine: its end is seen
  // a moment later.
  EXPECT_TRUE(WaitFor([&] { return json::parse(Get("/load").body)["server_load"] == 0; }));
}

TEST_F(ServerTest, SlowReaderIsCancelledAndOthersGoOn) {
  FakeModelOptions model = Endless(0);
  ServerOptions options;
  options.limits.stream_buffer_bytes = 10'000;
  options.limits.write_time = milliseconds(500);
  Start(std::move(model), options);
  RawClient slow(server_->port());
  slow.ShrinkReceiveBuffer();
  slow.Send(PostText(kChat, Chat("x", {{"stream", true}, {"n", 32}}).dump()));
  RawClient other(server_->port());
  other.Send(PostText(kChat, Chat("x", {{"max_tokens", 200}}).dump()));
  EXPECT_EQ(other.ReadReply().status, 200);
  ExpectIdle();
}

TEST_F(ServerTest, HeartbeatsAndProgressWhilePrefilling) {
  FakeModelOptions model = Gated();
  model.engine.max_num_batched_tokens = 64;
  ServerOptions options;
  options.heartbeat = milliseconds(30);
  Start(std::move(model), options);
  RawClient silent(server_->port());
  silent.Send(
      PostText(kChat, Chat(std::string(300, 'x'), {{"stream", true}, {"max_tokens", 1}}).dump()));
  EXPECT_NE(silent.ReadUntil(": heartbeat\n\n").find(": heartbeat\n\n"), std::string::npos);
  gate_->Open();
  EXPECT_NE(silent.ReadUntil("[DONE]").find("[DONE]"), std::string::npos);
  ExpectIdle();
  gate_->Close();
  const json body = Chat(std::string(300, 'x'), {{"stream", true},
                                                 {"max_tokens", 1},
                                                 {"cache_salt", "computed again"},
                                                 {"stream_options", {{"include_progress", true}}}});
  int64_t last = -1;
  int events = 0;
  RawClient client(server_->port());
  client.Send(PostText(kChat, body.dump()));
  const auto end = std::chrono::steady_clock::now() + testing::kPatience;
  while (true) {
    const std::string event = client.ReadUntil("\n\n");
    ASSERT_FALSE(event.empty());
    ASSERT_LT(std::chrono::steady_clock::now(), end);  // heartbeats go on for ever
    const size_t at = event.find("data: ");
    if (at == std::string::npos) continue;
    const std::string data = event.substr(at + 6);
    if (data == "[DONE]\n\n") break;
    const json chunk = json::parse(data);
    if (!chunk.contains("prompt_progress")) continue;
    ++events;
    EXPECT_GT(chunk["prompt_progress"]["processed"].get<int64_t>(), last);
    last = chunk["prompt_progress"]["processed"];
    EXPECT_LE(last, chunk["prompt_progress"]["total"]);
    gate_->Allow(1);  // the next step only now: each one is told of by itself
  }
  EXPECT_GE(events, 3);
  ExpectIdle();
}

TEST_F(ServerTest, EngineErrorsFailTheRequestAndNothingElse) {
  std::atomic<bool> broken{true};
  FakeModelOptions model;
  model.on_step = [&broken]() -> Status {
    if (broken) return Fail(Code::kInternal, "the step broke");
    return {};
  };
  Start(std::move(model));
  const RawReply plain = Post(kChat, Chat("x"));
  EXPECT_EQ(plain.status, 500);
  EXPECT_EQ(json::parse(plain.body)["error"]["message"], "the step broke");
  const auto events = EventData(Post(kChat, Chat("x", {{"stream", true}})).body);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(json::parse(events[0])["error"]["message"], "the step broke");
  EXPECT_EQ(events[1], "[DONE]");
  broken = false;
  EXPECT_EQ(Post(kChat, Chat("x")).status, 200);
}

TEST_F(ServerTest, StalledEngineTurnsUnhealthyAndFailsItsRequests) {
  FakeModelOptions model;
  model.on_step = [gate = gate_] { return gate->Pass(); };
  ServerOptions options;
  options.heartbeat = milliseconds(50);
  options.unhealthy_after = milliseconds(200);
  options.stall_limit = milliseconds(3'000);  // heartbeats come long before
  Start(std::move(model), options);
  RawClient client(server_->port());
  client.Send(PostText(kChat, Chat("x", {{"stream", true}}).dump()));
  EXPECT_TRUE(WaitFor([&] { return Get("/health").status == 503; }));
  const RawReply reply = client.ReadReply();
  EXPECT_NE(reply.body.find(": heartbeat"), std::string::npos);
  const auto events = EventData(reply.body);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(json::parse(events[0])["error"]["code"], "service_unavailable");
  gate_->Open();
  ExpectIdle();
  EXPECT_EQ(Get("/health").status, 200);
}

TEST_F(ServerTest, DrainFinishesWhatRunsAndRefusesTheRest) {
  Start(Gated());
  gate_->Allow(3);  // far from the end
  RawClient running(server_->port());
  running.Send(PostText(kChat, Chat("x", {{"stream", true}, {"max_tokens", 60}}).dump()));
  running.ReadUntil("assistant");
  RawClient idle(server_->port());
  server_->BeginDrain();
  EXPECT_FALSE(server_->WaitDrained(milliseconds(20)));
  idle.Send(PostText(kChat, Chat("x").dump()));
  const RawReply refused = idle.ReadReply();
  EXPECT_EQ(refused.status, 503);
  EXPECT_NE(refused.head.find("Connection: close"), std::string::npos);
  EXPECT_EQ(Get("/health").status, 503);
  gate_->Open();
  EXPECT_NE(running.ReadUntil("[DONE]").find("\"finish_reason\":\"length\""), std::string::npos);
  EXPECT_TRUE(server_->WaitDrained(testing::kPatience));
}

TEST_F(ServerTest, StoppingCutsRunningStreams) {
  Start(Endless());
  RawClient client(server_->port());
  client.Send(PostText(kChat, Chat("x", {{"stream", true}}).dump()));
  client.ReadUntil("assistant");
  server_.reset();
  client.ReadToEnd();
  ExpectIdle();
}

TEST_F(ServerTest, SlowHeadsAndBodiesTimeOut) {
  ServerOptions options;
  options.limits.header_time = milliseconds(100);
  options.limits.body_time = milliseconds(100);
  Start({}, options);
  EXPECT_EQ(Raw("GET /health HT").status, 408);
  EXPECT_EQ(Raw("POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{").status, 408);
  // By itself: above, the time between connecting and sending must not be limited.
  server_.reset();
  options.limits.idle_time = milliseconds(100);
  Start({}, options);
  RawClient idle(server_->port());
  EXPECT_EQ(idle.ReadToEnd(), "");
}

TEST_F(ServerTest, ManyConcurrentStreamsOnSeveralThreads) {
  ServerOptions options;
  options.http_threads = 3;
  Start({}, options);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 64; ++t) {
    threads.emplace_back([&, t] {
      const std::string text = fmt::format("request number {} says something of its own", t);
      const std::string body = Post(kChat, Chat(text, {{"stream", true}})).body;
      std::string content;
      for (const std::string& event : EventData(body)) {
        if (event == "[DONE]") continue;
        const json delta = json::parse(event)["choices"][0]["delta"];
        if (delta.contains("content")) content += delta["content"];
      }
      if (content == text) ++right;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 64);
  ExpectIdle();
}

}  // namespace
}  // namespace fathom
