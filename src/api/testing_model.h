// For tests and benchmarks: a served model without weights. Replies come from a script.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "api/served_model.h"
#include "api/testing_tokenizer.h"
#include "engine/engine.h"
#include "text/chat.h"

namespace fathom::testing {

// The model's next token given the history (prompt first); see engine/testing_executor.h.
using NextToken = std::function<TokenId(std::span<const TokenId> history)>;

struct FakeModelOptions {
  NextToken next_token;  // empty: repeats the last user text's bytes, then ends
  std::function<Status()> on_step;
  EngineOptions engine;
};

// A served model whose parts it owns.
class FakeModel {
 public:
  explicit FakeModel(FakeModelOptions options = {});

  ByteTokenizer tokenizer;
  std::unique_ptr<ChatEncoder> encoder;
  std::unique_ptr<Engine> engine;
  ServedModel served;

  TokenId eos() const { return encoder->eos(); }
  // A script that answers every prompt with `text`, then the end token.
  static NextToken Say(const std::string& text);
};

}  // namespace fathom::testing
