#include <gmock/gmock.h>

#include "api/explanation.h"
#include "api/server.h"
#include "api/testing_model.h"
#include "cli/explain_text.h"
#include "cli/http_client.h"

namespace fathom {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(HttpUrl, PartsAreToldApart) {
  const auto url = [](const char* text) {
    const Expected<HttpUrl> parsed = ParseHttpUrl(text);
    return parsed ? parsed->host + "|" + parsed->port + "|" + parsed->path
                  : "refused: " + parsed.error().message;
  };
  EXPECT_EQ(url("http://127.0.0.1:8000"), "127.0.0.1|8000|");
  EXPECT_EQ(url("http://node/"), "node|80|");
  EXPECT_EQ(url("http://[::1]:8000/proxy/fathom/"), "::1|8000|/proxy/fathom");
  EXPECT_THAT(url("https://node"), HasSubstr("https is not supported"));
  for (const char* wrong : {"", "node:8000", "http://", "http://:80", "http://node:", "http://[::1",
                            "http://node:8x", "http://node:65536", "http://[::1]8000"}) {
    EXPECT_THAT(url(wrong), HasSubstr("refused: '" + std::string(wrong) + "'"));
  }
}

TEST(PercentEncode, LeavesOnlyWhatAPathMayHold) {
  EXPECT_EQ(PercentEncode("chatcmpl-5f_0c.~"), "chatcmpl-5f_0c.~");
  EXPECT_EQ(PercentEncode("a/b ?é"), "a%2Fb%20%3F%C3%A9");
}

TEST(HttpGet, NobodyThereIsNamed) {
  const Expected<HttpReply> reply = HttpGet("http://127.0.0.1:1", "/health", "");
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, Code::kUnavailable);
  EXPECT_THAT(reply.error().message, HasSubstr("http://127.0.0.1:1"));
}

TEST(HttpGet, AnswersAndRefusalsAreReplies) {
  testing::FakeModel model;
  ServerOptions options;
  options.host = "127.0.0.1";
  options.port = 0;
  options.api_keys = {"secret"};
  const auto server = *Server::Start(options, model.served);
  const std::string url = "http://127.0.0.1:" + std::to_string(server->port());
  EXPECT_EQ(HttpGet(url, "/v1/models", "secret")->status, 200);
  EXPECT_THAT(HttpGet(url, "/v1/models", "secret")->body, HasSubstr("fake"));
  EXPECT_EQ(HttpGet(url, "/v1/models", "")->status, 401);
  EXPECT_EQ(HttpGet(url, "/v1/explain/none", "secret")->status, 404);
}

json Entry(const Explanation& explanation) {
  ExplainLog log;
  log.Add(explanation);
  return json::parse(*log.Find(explanation.id));
}

TEST(ExplainText, ShowsWhatTheServerSays) {
  RequestReport report;
  report.prefix = {.prompt_tokens = 5210,
                   .matched_tokens = 5130,
                   .matched_blocks = 20,
                   .boundary = 4096,
                   .rebuilt = 768,
                   .device_tokens = 4000,
                   .disk_tokens = 96,
                   .reason = MissReason::kNoBundle};
  report.queue_seconds = 0.25;
  report.bytes[0] = 2048;
  Explanation explanation{.id = "chatcmpl-1", .request_id = "1", .model = "demo", .session = "s"};
  explanation.choices = {{"stop", 12, std::make_shared<RequestReport>(report)}};
  const std::string text = *ExplainText(Entry(explanation));
  for (const char* part :
       {"chatcmpl-1 (X-Request-Id 1)", "1970-01-01 00:00:00 UTC", "session          s\n",
        "stop after 12 tokens", "5,210 tokens", "5,130 tokens agree, 20 whole blocks",
        "4,096 tokens; 1,034 tokens of the prefix recomputed",
        "768 tokens of them for their windows alone\n",
        "rows reach token 5,130, but no bundle was saved after token 4,096 (no_bundle)",
        "computed     1,114 tokens", "device       4,000 tokens", "disk         96 tokens",
        "queue 0.250 s, prefill 0.000 s", "csa_kv       2,048 B (2.000 KiB)"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(text, Not(HasSubstr("host")));  // nothing came from there
  EXPECT_THAT(text, Not(HasSubstr("choice")));
}

TEST(ExplainText, SeveralChoicesAndMissingReports) {
  Explanation explanation{.id = "cmpl-1", .request_id = "1", .model = "demo"};
  explanation.choices = {{"stop", 1, std::make_shared<RequestReport>()}, {"error", 0, nullptr}};
  const std::string text = *ExplainText(Entry(explanation));
  EXPECT_THAT(text, HasSubstr("choice 0\nfinish           stop after 1 token\n"));
  EXPECT_THAT(text, HasSubstr("choice 1\nfinish           error after 0 tokens\n"));
  EXPECT_THAT(text, HasSubstr("the engine gave no report"));
}

TEST(ExplainText, AnotherServersAnswerIsRefusedByField) {
  json entry =
      Entry({.id = "1", .request_id = "1", .model = "m", .choices = {{"stop", 1, nullptr}}});
  entry["fathom"].erase("finish_reason");
  const Expected<std::string> text = ExplainText(entry);
  ASSERT_FALSE(text);
  EXPECT_THAT(text.error().message, HasSubstr("finish_reason"));
}

}  // namespace
}  // namespace fathom
