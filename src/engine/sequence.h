// Sequence: one request branch inside the engine: its tokens, its block table, its slot and how far
// it has been computed. Owned by the engine, touched by the engine thread alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache/prefix_cache.h"
#include "core/ids.h"
#include "engine/request.h"
#include "engine/sampler.h"

namespace fathom {

struct Sequence {
  Sequence(RequestId request_id, Request asked, int64_t total_limit, Clock::time_point when)
      : id(request_id),
        arrival(when),
        prompt_tokens(static_cast<int64_t>(asked.prompt.size())),
        limit(total_limit),
        tokens(std::move(asked.prompt)),
        request(std::move(asked)),
        sampler(request) {}

  RequestId id;               // ascending with arrival
  Clock::time_point arrival;  // at Submit
  int64_t prompt_tokens;
  int64_t limit;                // prompt and generated tokens together, at most
  std::vector<TokenId> tokens;  // prompt, then generated
  Request request;              // its prompt has moved to `tokens`
  Sampler sampler;

  // Cache state; the scheduler's.
  std::vector<BlockId> blocks;       // block i holds positions [i*block_tokens, (i+1)*block_tokens)
  std::optional<SlotId> slot;        // held while running
  int64_t computed = 0;              // tokens whose rows and state are in the cache
  int64_t furthest_prefill = 0;      // most prompt tokens ever computed; a preemption keeps it
  int64_t prompt_logprobs_done = 0;  // entries delivered; entry i is about position i + 1
  uint64_t last_step = 0;            // when it last ran
  int preemptions = 0;
  int64_t recomputed = 0;  // tokens computed again after them

  // Prefix cache.
  PrefixPath path;             // open while the scheduler knows the sequence
  PrefixReport prefix;         // of the first admission
  bool counted = false;        // in the engine's statistics
  std::vector<int64_t> saves;  // tokens at which it is to be saved, descending
  int64_t emit_from = 0;       // rows below it are in the cache; windows right from there on
  int64_t blocked_room = -1;   // blocks there were when it did not fit, and when that was
  double blocked_at = 0;
  RequestId behind{};        // a running sequence that computes the start of its prompt,
  int64_t behind_until = 0;  // up to that token; 0: none
  int loads = 0;             // times it had parts read from disk
  int64_t awaited = 0;       // the boundary it waited for then

  // Seconds on the engine's clock.
  double arrived_at = 0;
  double admitted_at = -1;  // first admission
  double first_token_at = -1;

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t generated() const { return length() - prompt_tokens; }
  int64_t remaining() const { return length() - computed; }
  // Decoding: nothing but the last sampled token is missing from the cache. Everything else, a
  // preempted sequence on its way back included, is prefill.
  bool decoding() const { return generated() > 0 && remaining() == 1; }
  // Has it saved at that token, when it gets there.
  void SaveAt(int64_t boundary) {
    const auto at = std::lower_bound(saves.begin(), saves.end(), boundary, std::greater<>());
    if (at == saves.end() || *at != boundary) saves.insert(at, boundary);
  }
  // Tokens to run at most from `begin`, so that a chunk ends where the sequence is to be saved.
  int64_t UntilSave(int64_t begin) const {
    return saves.empty() ? length() - begin : std::min(length(), saves.back()) - begin;
  }
  // Whether the logits at `position` are needed: the next token is sampled from the last one's, and
  // prompt_logprobs reads those of each prompt token with a successor in the prompt, once.
  bool wants_logits(int64_t position) const {
    return position == length() - 1 || wants_prompt_logprob(position);
  }
  bool wants_prompt_logprob(int64_t position) const {
    return request.prompt_logprobs >= 0 && position < prompt_tokens - 1 &&
           position >= prompt_logprobs_done;
  }
};

// The order of the queue and of the right to memory: lower priority value first, then arrival.
struct Precedes {
  bool operator()(const Sequence* a, const Sequence* b) const {
    if (a->request.priority != b->request.priority) {
      return a->request.priority < b->request.priority;
    }
    return a->id < b->id;
  }
};

}  // namespace fathom
