// Bytes as bodies of every JSON route: parsed, validated and encoded. A refusal must be a 4xx whose
// body is JSON; an accepted prompt must hold tokens of the vocabulary alone.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "api/api_error.h"
#include "api/generation.h"
#include "api/json_text.h"
#include "api/short_routes.h"
#include "api/testing_tokenizer.h"

namespace fathom {
namespace {

struct Target {
  Target() : encoder(std::move(*ChatEncoder::Make(tokenizer))) {
    model.tokenizer = &tokenizer;
    model.encoder = &encoder;
    model.names = {"fake"};
    model.max_model_len = 4096;
  }
  testing::ByteTokenizer tokenizer;
  ChatEncoder encoder;
  ServedModel model;
};

void Check(const Expected<GenerationPlan>& plan, const ServedModel& model) {
  if (!plan) {
    const ApiError error = ToApiError(plan.error());
    if (error.status < 400 || error.status >= 500 || error.message.empty()) std::abort();
    if (!nlohmann::json::accept(OpenAiErrorBody(error))) std::abort();
    return;
  }
  for (const auto& prompt : plan->prompts) {
    if (prompt.empty()) std::abort();
    for (const TokenId id : prompt) {
      if (id < 0 || id >= model.tokenizer->vocab_size()) std::abort();
    }
  }
}

void Check(const HttpResponse& response) {
  if (response.status >= 500 || !nlohmann::json::accept(response.body)) std::abort();
}

}  // namespace
}  // namespace fathom

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace fathom;
  static const Target target;
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  Check(PrepareChat(body, target.model), target.model);
  Check(PrepareCompletion(body, target.model), target.model);
  Check(TokenizeReply(body, target.model));
  Check(DetokenizeReply(body, target.model));
  return 0;
}
