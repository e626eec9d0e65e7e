#include "engine/validate.h"

#include <algorithm>
#include <limits>

#include "cache/pool_sizes.h"

namespace fathom {
namespace {

Status CheckVocabulary(const Request& request, int64_t vocab_size) {
  const auto inside = [&](TokenId token) { return token >= 0 && token < vocab_size; };
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (!inside(request.prompt[i])) {
      return FailParam(Code::kInvalidArgument, "prompt",
                       "token {} at position {} is outside the vocabulary of {}", request.prompt[i],
                       i, vocab_size);
    }
  }
  for (const TokenId token : request.stop_tokens) {
    if (!inside(token)) {
      return FailParam(Code::kInvalidArgument, "stop_token_ids",
                       "stop token {} is outside the vocabulary of {}", token, vocab_size);
    }
  }
  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (!inside(token)) {
      return FailParam(Code::kInvalidArgument, "logit_bias",
                       "token {} is outside the vocabulary of {}", token, vocab_size);
    }
  }
  return {};
}

}  // namespace

Expected<EngineOptions> CompleteOptions(EngineOptions options, const Geometry& geometry) {
  if (options.max_model_len == 0) options.max_model_len = geometry.max_positions;
  const auto positive = [](const char* name, int64_t value) -> Status {
    if (value > 0 && value <= std::numeric_limits<int32_t>::max()) return {};
    return FailParam(Code::kInvalidArgument, name, "{} is {}, which is not in [1, 2147483647]",
                     name, value);
  };
  FATHOM_TRY(positive("max_model_len", options.max_model_len));
  FATHOM_TRY(positive("max_num_seqs", options.max_num_seqs));
  FATHOM_TRY(positive("max_num_batched_tokens", options.max_num_batched_tokens));
  FATHOM_TRY(positive("max_prefill_with_decode", options.max_prefill_with_decode));
  FATHOM_TRY(positive("max_waiting", options.max_waiting));
  if (options.num_blocks == 0) {
    options.num_blocks = static_cast<int32_t>(geometry.blocks_for(options.max_model_len));
  }
  FATHOM_TRY(positive("num_blocks", options.num_blocks));
  FATHOM_TRY(positive("bundle_interval", options.bundle_interval));
  // Whole blocks: a bundle at a block's end needs no tail.
  options.bundle_interval =
      geometry.blocks_for(options.bundle_interval) * geometry.options.block_tokens;
  if (options.disk != nullptr && options.disk_windows.every > 0) {
    options.bundle_interval = std::min(options.bundle_interval, options.disk_windows.every);
  }
  if (options.num_bundles < 0) {
    const PoolDemand demand{.context = options.max_model_len, .slots = options.max_num_seqs};
    options.num_bundles = static_cast<int32_t>(BundlesFor(geometry, demand, options.num_blocks));
  }
  if (options.host_blocks < 0 || options.host_bundles < 0) {
    return FailParam(Code::kInvalidArgument, "host_blocks",
                     "a host tier of {} blocks and {} bundles", options.host_blocks,
                     options.host_bundles);
  }
  return options;
}

Expected<int64_t> CheckRequest(const Request& request, const EngineOptions& options,
                               const Geometry& geometry, int64_t vocab_size) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  if (prompt == 0) {
    return FailParam(Code::kInvalidArgument, "prompt", "the prompt is empty");
  }
  if (request.max_tokens < 0) {
    return FailParam(Code::kInvalidArgument, "max_tokens", "max_tokens is {}, below 0",
                     request.max_tokens);
  }
  if (request.min_tokens < 0 ||
      (request.max_tokens > 0 && request.min_tokens > request.max_tokens)) {
    return FailParam(Code::kInvalidArgument, "min_tokens",
                     "min_tokens is {}, outside [0, max_tokens = {}]", request.min_tokens,
                     request.max_tokens);
  }
  if (request.logprobs < -1 || request.logprobs > vocab_size) {
    return FailParam(Code::kInvalidArgument, "logprobs", "logprobs is {}, outside [0, {}]",
                     request.logprobs, vocab_size);
  }
  if (request.prompt_logprobs < -1 || request.prompt_logprobs > vocab_size) {
    return FailParam(Code::kInvalidArgument, "prompt_logprobs",
                     "prompt_logprobs is {}, outside [0, {}]", request.prompt_logprobs, vocab_size);
  }
  FATHOM_TRY(CheckVocabulary(request, vocab_size));

  const int64_t least = std::max<int64_t>(1, request.max_tokens);
  if (least > options.max_model_len - prompt) {  // no sum: max_tokens may be anything
    return FailParam(Code::kContextLength, request.max_tokens > 0 ? "max_tokens" : "prompt",
                     "the prompt has {} tokens and max_tokens asks for {} more, but the context "
                     "holds {}",
                     prompt, least, options.max_model_len);
  }
  const int64_t pool_tokens = int64_t{options.num_blocks} * geometry.options.block_tokens;
  if (prompt + least > pool_tokens) {
    return FailParam(Code::kResourceExhausted, request.max_tokens > 0 ? "max_tokens" : "prompt",
                     "the prompt of {} tokens and {} more need {} cache blocks, the pool has {} "
                     "({} tokens)",
                     prompt, least, geometry.blocks_for(prompt + least), options.num_blocks,
                     pool_tokens);
  }
  if (request.max_tokens > 0) return prompt + request.max_tokens;
  return std::min(options.max_model_len, pool_tokens);
}

}  // namespace fathom
