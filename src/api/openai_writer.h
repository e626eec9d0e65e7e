// What the two OpenAI writers share: envelope, usage, progress, errors, prompt log-probabilities.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "api/reply_writer.h"

namespace fathom {

class OpenAiWriter : public ReplyWriter {
 public:
  // `object` is the chunk object's name.
  OpenAiWriter(Generation& generation, std::string_view object);

  void AppendProgress(std::string* out) override;
  void AppendEnd(std::string* out) override;
  void AppendError(const Error& error, std::string* out) override;

 protected:
  // Opens a chunk up to and including "choices":[ and closes it again.
  void BeginChunk(std::string* out) const { *out += head_; }
  void EndChunk(std::string* out) const;
  // Adds the `fathom` object to a finished reply, if it was asked for.
  void AddExplanation(nlohmann::ordered_json* reply) const;

  std::string TokenText(TokenId token) const;  // for logprobs; U+FFFD where it is no whole text
  nlohmann::ordered_json UsageJson() const;
  // vLLM's prompt_logprobs: null, then one {"id": {logprob, rank, decoded_token}} per token.
  nlohmann::ordered_json PromptLogprobsJson(const Choice& choice) const;
  // The finished reply's fields around "choices".
  nlohmann::ordered_json Envelope(std::string_view object) const;

  Generation& generation_;

 private:
  std::string head_;
};

// JSON has no infinities: impossible tokens get OpenAI's -9999.
double FiniteLogprob(float logprob);

}  // namespace fathom
