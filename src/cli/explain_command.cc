// `fathom explain`: where the time and bytes of one request of a running server went.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/explain_text.h"
#include "cli/http_client.h"

namespace fathom {
namespace {

struct ExplainOptions {
  std::string id;
  std::string url = "http://127.0.0.1:8000";
  std::string api_key;
  bool json = false;
};

// The sentence of an error reply, or the reply itself.
std::string ErrorText(const HttpReply& reply) {
  const nlohmann::json body = nlohmann::json::parse(reply.body, nullptr, false);
  if (body.is_object() && body.contains("error") && body["error"].is_object() &&
      body["error"].contains("message") && body["error"]["message"].is_string()) {
    return body["error"]["message"].get<std::string>();
  }
  return reply.body.substr(0, 200);
}

Status RunExplain(const ExplainOptions& options) {
  if (options.id.empty()) {
    return FailParam(Code::kInvalidArgument, "id",
                     "the ID is missing: a reply's id or its X-Request-Id");
  }
  FATHOM_ASSIGN(const HttpReply reply,
                HttpGet(options.url, "/v1/explain/" + PercentEncode(options.id), options.api_key));
  if (reply.status != 200) {
    return Fail(reply.status == 404 ? Code::kNotFound : Code::kUnavailable, "{}: status {}: {}",
                options.url, reply.status, ErrorText(reply));
  }
  const nlohmann::json entry = nlohmann::json::parse(reply.body, nullptr, false);
  if (!entry.is_object()) {
    return Fail(Code::kDataLoss, "{}: the reply is not JSON", options.url);
  }
  if (options.json) {
    fmt::print("{}\n", reply.body);
    return {};
  }
  FATHOM_ASSIGN(const std::string text, ExplainText(entry));
  fmt::print("{}", text);
  return {};
}

}  // namespace

void AddExplainCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<ExplainOptions>();
  auto command = Command::Add(app, "explain", "Where a request's time and bytes went",
                              "  fathom explain chatcmpl-5f0c\n"
                              "  fathom explain my-request-id --url http://10.0.0.7:8000\n"
                              "  fathom explain chatcmpl-5f0c --json | jq .fathom.reason");
  command->Positional("id", options->id, "a reply's id, its X-Request-Id, or the beginning of one");
  command->Text("--url", options->url, "URL", "of the server");
  command->Text("--api-key", options->api_key, "KEY", "when the server wants one");
  command->Secret("--api-key");
  command->Switch("--json", options->json, "what the server answered, as it is");
  command->OnRun(exit_code, [options](Command&) {
    const Status status = RunExplain(*options);
    return status ? 0 : ReportError(status.error());
  });
}

}  // namespace fathom
