// What the prefix cache did for a request: exact counts in every form of the reply, the `fathom`
// object, /v1/explain and the counters.
#include "api/explanation.h"

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "api/server.h"
#include "api/testing_client.h"
#include "api/testing_model.h"

namespace fathom {
namespace {

using nlohmann::json;
using testing::EventData;
using testing::FakeModel;
using testing::FakeModelOptions;
using ::testing::HasSubstr;
using testing::PostText;
using testing::RawClient;
using testing::RawReply;

constexpr char kChat[] = "/v1/chat/completions";
constexpr char kPlain[] = "/v1/completions";

TEST(ExplainLog, KeepsTheLastRequestsByBothIds) {
  ExplainLog log;
  Explanation explanation;
  explanation.choices.resize(1);
  for (size_t i = 0; i < ExplainLog::kRequests + 10; ++i) {
    explanation.request_id = "r" + std::to_string(i);
    explanation.id = "chatcmpl-" + explanation.request_id;
    log.Add(explanation);
  }
  EXPECT_EQ(log.size(), ExplainLog::kRequests);
  EXPECT_FALSE(log.Find("r9"));
  EXPECT_FALSE(log.Find("chatcmpl-r9"));
  EXPECT_EQ(json::parse(*log.Find("r10"))["id"], "chatcmpl-r10");
  EXPECT_EQ(*log.Find("chatcmpl-r10"), *log.Find("r10"));
  EXPECT_FALSE(log.Find(""));
}

TEST(ExplainLog, TheBeginningOfOneRequestsIdIsEnough) {
  ExplainLog log;
  Explanation explanation;
  for (const char* id : {"chatcmpl-5f0c", "chatcmpl-5f1d", "cmpl-5f"}) {
    explanation.id = id;
    explanation.request_id = std::string("of-") + id;
    log.Add(explanation);
  }
  EXPECT_EQ(json::parse(*log.Find("chatcmpl-5f0"))["id"], "chatcmpl-5f0c");
  EXPECT_EQ(json::parse(*log.Find("of-cm"))["id"], "cmpl-5f");
  // Both ids of one request begin so.
  explanation.id = "same-1", explanation.request_id = "same-2";
  log.Add(explanation);
  EXPECT_EQ(json::parse(*log.Find("same"))["id"], "same-1");
  const auto several = log.Find("chatcmpl-5f");
  ASSERT_FALSE(several);
  EXPECT_EQ(several.error().code, Code::kInvalidArgument);
  EXPECT_THAT(several.error().message, HasSubstr("'chatcmpl-5f' is the beginning of 2 requests'"));
  ASSERT_FALSE(log.Find("5f"));
  EXPECT_EQ(log.Find("5f").error().code, Code::kNotFound);
}

TEST(ExplainLog, AnIdThatComesAgainIsTheLatest) {
  ExplainLog log;
  Explanation explanation;
  explanation.id = "a";
  explanation.request_id = "same";
  log.Add(explanation);
  for (size_t i = 0; i < ExplainLog::kRequests; ++i) {
    explanation.id = "b" + std::to_string(i);
    explanation.request_id = i == 5 ? "same" : "other" + std::to_string(i);
    log.Add(explanation);  // in the end the first one is dropped, its id lives on
  }
  EXPECT_EQ(json::parse(*log.Find("same"))["id"], "b5");
  EXPECT_FALSE(log.Find("a"));
}

TEST(ExplainLog, LargeEntriesAreBoundedInBytes) {
  ExplainLog log;
  Explanation explanation;
  auto report = std::make_shared<RequestReport>();
  explanation.choices.resize(128, {"stop", 1, report});
  for (size_t i = 0; i < ExplainLog::kRequests; ++i) {
    explanation.id = explanation.request_id = std::to_string(i);
    log.Add(explanation);
  }
  const size_t entry = log.Find(explanation.id)->size();
  EXPECT_LE(log.size() * entry, ExplainLog::kBytes + 10 * ExplainLog::kRequests);
  EXPECT_GT(log.size(), ExplainLog::kBytes / entry / 2);
  EXPECT_FALSE(log.Find("0"));
}

// Blocks of 256 tokens, one per byte of text.
class ExplainTest : public ::testing::Test {
 protected:
  void Start(FakeModelOptions model = {}, ServerOptions options = {}) {
    model_ = std::make_unique<FakeModel>(std::move(model));
    options.host = "127.0.0.1";
    options.port = 0;
    server_ = *Server::Start(options, model_->served);
  }
  RawReply Raw(std::string_view request) {
    RawClient client(server_->port());
    client.Send(request);
    return client.ReadReply();
  }
  json Post(std::string_view path, const json& body, std::string_view headers = "") {
    const RawReply reply = Raw(PostText(path, body.dump(), headers));
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body);
  }
  // The chunks of a stream without [DONE].
  std::vector<json> Stream(std::string_view path, json body) {
    body["stream"] = true;
    std::vector<json> chunks;
    for (const std::string& event : EventData(Raw(PostText(path, body.dump())).body)) {
      if (event != "[DONE]") chunks.push_back(json::parse(event));
    }
    return chunks;
  }
  RawReply Get(const std::string& path, const std::string& headers = "") {
    return Raw("GET " + path + " HTTP/1.1\r\nHost: t\r\n" + headers + "\r\n");
  }
  // A request's entry; the log has it soon after the reply.
  json Explained(const std::string& id) {
    RawReply reply;
    const auto end = std::chrono::steady_clock::now() + testing::kPatience;
    while (std::chrono::steady_clock::now() < end) {
      reply = Get("/v1/explain/" + id);
      if (reply.status == 200) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(reply.status, 200) << reply.body;
    return json::parse(reply.body);
  }
  double Metric(const std::string& name, const std::string& labels = "") {
    std::istringstream page(Get("/metrics").body);
    for (std::string line; std::getline(page, line);) {
      if (line.rfind(name + "{", 0) == 0 && line.find(labels) != std::string::npos) {
        return std::stod(line.substr(line.rfind(' ')));
      }
    }
    ADD_FAILURE() << "no metric " << name << " " << labels;
    return 0;
  }
  static json Chat(const std::string& text, json extra = json::object()) {
    json body = {{"messages", json::array({{{"role", "user"}, {"content", text}}})}};
    body.update(extra);
    return body;
  }
  static int64_t Cached(const json& usage) {
    EXPECT_EQ(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_cache_hit_tokens"]);
    EXPECT_EQ(usage["prompt_cache_hit_tokens"].get<int64_t>() +
                  usage["prompt_cache_miss_tokens"].get<int64_t>(),
              usage["prompt_tokens"]);
    return usage["prompt_cache_hit_tokens"];
  }

  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<Server> server_;
};

const json kAsk = {{"fathom", {{"explain", true}}}};

TEST_F(ExplainTest, UsageIsTheSameInEveryForm) {
  Start();
  for (const char* path : {kChat, kPlain}) {
    const auto body = [&](const char* salt) {
      json body = path == kChat ? Chat(std::string(1000, 'x'))
                                : json{{"prompt", std::string(1000, 'x') + ">"}};
      body["max_tokens"] = 4;
      body["cache_salt"] = salt;
      return body;
    };
    const json cold = Post(path, body(path))["usage"];
    EXPECT_EQ(Cached(cold), 0);
    const json warm = Post(path, body(path))["usage"];
    EXPECT_GT(Cached(warm), 900);  // all but the end of the prompt
    EXPECT_LT(Cached(warm), warm["prompt_tokens"]);
    json streamed = body(path);
    streamed["stream_options"] = {{"include_usage", true}};
    EXPECT_EQ(Stream(path, streamed).back()["usage"], warm);
    streamed["stream_options"]["continuous_usage_stats"] = true;
    const std::vector<json> chunks = Stream(path, streamed);
    for (const json& chunk : chunks) EXPECT_EQ(Cached(chunk["usage"]), Cached(warm));
    EXPECT_EQ(chunks.back()["usage"], warm);
    EXPECT_EQ(Cached(Post(path, body("another salt"))["usage"]), 0);
  }
}

TEST_F(ExplainTest, RepliesSayWhatTheCacheDid) {
  Start();
  const std::string text(700, 'x');
  const json cold = Post(kChat, Chat(text, kAsk))["fathom"];
  EXPECT_EQ(cold["boundary"], 0);
  EXPECT_EQ(cold["reason_code"], "nothing_cached");
  EXPECT_EQ(cold["tokens_by_source"]["computed"], cold["prompt_tokens"]);
  const json reply = Post(kChat, Chat(text, kAsk));
  const json warm = reply["fathom"];
  const int64_t prompt = reply["usage"]["prompt_tokens"];
  EXPECT_EQ(warm["prompt_tokens"], prompt);
  EXPECT_EQ(warm["boundary"], reply["usage"]["prompt_cache_hit_tokens"]);
  EXPECT_EQ(warm["blocks_matched"], prompt / 256);
  const json& source = warm["tokens_by_source"];
  EXPECT_EQ(source["device"], warm["boundary"]);
  EXPECT_EQ(source["host"], 0);
  EXPECT_EQ(source["disk"], 0);
  EXPECT_EQ(source["computed"].get<int64_t>() + source["device"].get<int64_t>(), prompt);
  EXPECT_EQ(warm["tokens_recomputed"].get<int64_t>(),
            warm["tokens_matched"].get<int64_t>() - warm["boundary"].get<int64_t>());
  EXPECT_EQ(warm["finish_reason"], "stop");
  for (const char* phase : {"queue", "prefill", "decode"}) {
    EXPECT_GE(warm["seconds"][phase].get<double>(), 0) << phase;
  }
  for (const char* kind : {"csa_kv", "hca_kv", "index_k", "window_kv"}) {
    EXPECT_TRUE(warm["bytes"][kind].is_number_integer()) << kind;
  }
  EXPECT_FALSE(Post(kChat, Chat(text)).contains("fathom"));
  // Another continuation says where it parts.
  const json parted = Post(kChat, Chat(std::string(600, 'x') + "yyy", kAsk))["fathom"];
  EXPECT_EQ(parted["reason_code"], "diverged");
  EXPECT_THAT(parted["reason"].get<std::string>(), HasSubstr("diverged at token 60"));
}

TEST_F(ExplainTest, AConversationGoesOnWhereItsReasoningIsLeftOut) {
  FakeModelOptions model;
  model.next_token = FakeModel::Say("thoughts</think>answer");
  Start(std::move(model));
  json body = Chat(std::string(600, 'x'), {{"thinking", true}});
  body.update(kAsk);
  const json first = Post(kChat, body);
  json reply = first["choices"][0]["message"];
  EXPECT_EQ(reply["reasoning_content"], "thoughts");
  body["messages"].push_back({{"role", "assistant"},
                              {"content", reply["content"]},
                              {"reasoning_content", reply["reasoning_content"]}});
  body["messages"].push_back({{"role", "user"}, {"content", "more"}});
  // The prompts part at the think marker, the last token of the first one.
  const json second = Post(kChat, body)["fathom"];
  EXPECT_EQ(second["boundary"].get<int64_t>(), first["usage"]["prompt_tokens"].get<int64_t>() - 1);
  EXPECT_EQ(second["tokens_recomputed"], 0);
}

TEST_F(ExplainTest, StreamsSayItInTheirLastChunkAlone) {
  Start();
  for (const bool usage : {true, false}) {
    json body = Chat(std::string(300, 'x'), kAsk);
    if (usage) body["stream_options"] = {{"include_usage", true}};
    const std::vector<json> chunks = Stream(kChat, body);
    ASSERT_GT(chunks.size(), 2u);
    for (size_t i = 0; i + 1 < chunks.size(); ++i) EXPECT_FALSE(chunks[i].contains("fathom"));
    EXPECT_TRUE(chunks.back()["choices"].empty());
    EXPECT_EQ(chunks.back().contains("usage"), usage);
    EXPECT_EQ(chunks.back()["fathom"]["finish_reason"], "stop");
    EXPECT_GT(chunks.back()["fathom"]["prompt_tokens"], 300);
  }
}

TEST_F(ExplainTest, StopStringsAndSeveralChoicesHaveTheirReports) {
  FakeModelOptions model;
  model.next_token = FakeModel::Say("some text that goes on and on");
  Start(std::move(model));
  json body = {{"prompt", json::array({"first>", "second>"})}, {"n", 2}, {"stop", "that"}};
  body.update(kAsk);
  const json whole = Post(kPlain, body)["fathom"];
  const json streamed = Stream(kPlain, body).back()["fathom"];
  for (const json& fathom : {whole, streamed}) {
    ASSERT_EQ(fathom["choices"].size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      const json& choice = fathom["choices"][i];
      EXPECT_EQ(choice["index"], i);
      EXPECT_EQ(choice["finish_reason"], "stop");
      EXPECT_EQ(choice["prompt_tokens"], i < 2 ? 6 : 7);
      EXPECT_TRUE(choice.contains("seconds"));
    }
    EXPECT_EQ(fathom["prompt_tokens"], 6);
  }
}

TEST_F(ExplainTest, TheLastRequestsCanBeAskedForByEitherId) {
  FakeModelOptions model;
  model.next_token = FakeModel::Say("some text that goes on");
  ServerOptions options;
  options.api_keys = {"secret"};
  Start(std::move(model), options);
  const std::string key = "Authorization: Bearer secret\r\n";
  const json reply = Post(kChat, Chat("x", {{"stop", "that"}, {"fathom", {{"session", "s1"}}}}),
                          key + "X-Request-Id: mine\r\n");
  EXPECT_EQ(Get("/v1/explain/mine").status, 401);
  RawReply found;
  do {
    found = Get("/v1/explain/mine", key);
  } while (found.status == 404);
  ASSERT_EQ(found.status, 200) << found.body;
  const json entry = json::parse(found.body);
  EXPECT_EQ(entry["id"], reply["id"]);
  EXPECT_EQ(entry["request_id"], "mine");
  EXPECT_EQ(entry["model"], "fake");
  EXPECT_EQ(entry["session"], "s1");
  EXPECT_EQ(entry["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens"]);
  EXPECT_EQ(entry["fathom"]["finish_reason"], "stop");
  EXPECT_TRUE(entry["fathom"].contains("seconds"));
  EXPECT_EQ(Get("/v1/explain/" + reply["id"].get<std::string>(), key).body, found.body);
  EXPECT_EQ(Get("/v1/explain/mi", key).body, found.body);
  Post(kChat, Chat("y"), key + "X-Request-Id: mink\r\n");
  RawReply several;  // as soon as the second one is there
  do {
    several = Get("/v1/explain/mi", key);
  } while (several.status == 200);
  EXPECT_EQ(several.status, 400);
  EXPECT_THAT(several.body, HasSubstr("'mi' is the beginning of 2 requests' ids"));

  const RawReply missing = Get("/v1/explain/r-7", key);
  EXPECT_EQ(missing.status, 404);
  EXPECT_THAT(missing.body, HasSubstr("'r-7'"));
  EXPECT_THAT(missing.body, HasSubstr("1024"));
  EXPECT_EQ(Raw(PostText("/v1/explain/mine", "{}", key)).status, 405);
}

TEST_F(ExplainTest, RequestsWhoseClientLeftAreExplainedToo) {
  FakeModelOptions model;
  model.next_token = [](auto) { return TokenId{'a'}; };
  model.on_step = []() -> Status {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return {};
  };
  Start(std::move(model));
  {
    RawClient client(server_->port());
    client.Send(PostText(kChat, Chat("x", {{"stream", true}}).dump(), "X-Request-Id: gone\r\n"));
    client.ReadUntil("\"content\":\"a");
  }
  const json entry = Explained("gone");
  EXPECT_EQ(entry["fathom"]["finish_reason"], "abort");
  EXPECT_GT(entry["fathom"]["seconds"]["decode"], 0);
}

TEST_F(ExplainTest, MetricsCountTokensByFateAndSource) {
  Start();
  const auto post = [&](const std::string& salt) {
    return Post(kChat, Chat(std::string(600, 'x'),
                            {{"cache_salt", salt}, {"fathom", {{"session", "s"}, {"ttl", 3600}}}}));
  };
  const double prompt = post("a")["usage"]["prompt_tokens"];
  const double hit = post("a")["usage"]["prompt_cache_hit_tokens"];
  post("b");
  EXPECT_EQ(Metric("vllm:prefix_cache_queries_total"), 3 * prompt);
  EXPECT_EQ(Metric("vllm:prefix_cache_hits_total"), hit);
  EXPECT_EQ(Metric("vllm:prompt_tokens_by_source_total", "source=\"computed\""), 3 * prompt - hit);
  EXPECT_EQ(Metric("vllm:prompt_tokens_by_source_total", "source=\"device\""), hit);
  EXPECT_EQ(Metric("vllm:prompt_tokens_by_source_total", "source=\"disk\""), 0);
  EXPECT_EQ(Metric("vllm:prompt_tokens_total"), 3 * prompt);
  EXPECT_EQ(Metric("vllm:prefix_cache_misses_total", "reason=\"nothing_cached\"") +
                Metric("vllm:prefix_cache_misses_total", "reason=\"salt_differs\"") +
                Metric("vllm:prefix_cache_whole_hits_total"),
            3);
  EXPECT_EQ(Metric("vllm:sessions_retained"), 1);
  EXPECT_GE(Metric("vllm:pool_units_used", "pool=\"bundles\""), 1);
  EXPECT_GT(Metric("vllm:pool_unit_bytes", "pool=\"bundles\""), 0);
  EXPECT_GE(Metric("vllm:pool_units_cached", "pool=\"blocks\""), 4);
  EXPECT_EQ(Metric("vllm:pool_units_used", "pool=\"blocks\""), 0);
  EXPECT_GT(Metric("vllm:cache_kind_bytes_total", "kind=\"csa_kv\""), 0);
  EXPECT_EQ(Metric("vllm:prefix_cache_evictions_total", "unit=\"blocks\""), 0);
  EXPECT_EQ(Metric("vllm:cache_tier_bytes_total", "tier=\"host\",direction=\"to\""), 0);
}

}  // namespace
}  // namespace fathom
