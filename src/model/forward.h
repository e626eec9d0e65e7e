// The forward pass of DeepSeek-V4, once, for every backend (forward.cc, in the model's order).
//
//   Forward forward(config, weights, backend, {.numerics = Numerics::kProduct, .max_tokens = 512});
//   forward.Run(step, kv, logit_rows, logits);
//
// All buffers are allocated in the constructor; Run allocates nothing. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "model/config.h"
#include "model/kv_view.h"
#include "model/weights.h"
#include "ops/backend.h"
#include "ops/step_view.h"

namespace fathom {

// Receives named intermediates, in memory of the backend and float32 or its activation type:
// "embed", "layers.3.streams", "layers.3.attn.in", ... (the list is kTapNames in forward.cc and
// `fathom dump --help`). Rows are the step's tokens.
class Tap {
 public:
  virtual ~Tap() = default;
  virtual bool Wants(std::string_view name) = 0;
  virtual void Put(std::string_view name, const MatrixView& value) = 0;
};

// ForwardOptions::branch_tokens on a GPU.
inline constexpr int kGpuBranchTokens = 64;

struct ForwardOptions {
  ops::Numerics numerics = ops::Numerics::kProduct;
  int max_tokens = 512;  // T of the largest step
  int max_logit_rows = 64;
  // Steps of at most so many tokens run the independent parts of attention beside each other, where
  // the backend can (ops::Backend::Branch); 0: none do. Results do not depend on it.
  int branch_tokens = 0;
  bool kv_rounding = true;   // false: the April reference code, whose KV rounding was a no-op
  bool shared_clamp = true;  // false: the April reference code, shared expert without clamp
};

class Forward {
 public:
  Forward(const ModelConfig& config, const Weights& weights, ops::Backend& backend,
          const ForwardOptions& options);
  ~Forward();

  // Runs one step and writes the logits of token indices `logit_rows` to logits
  // [logit_rows.size(), V]. All arrays, those of `step` and `logit_rows` included, lie where the
  // backend computes. Cache rows, window rings and compressor states are updated in place.
  void Run(const ops::StepView& step, const KvView& kv, std::span<const int32_t> logit_rows,
           const MatrixView& logits, Tap* tap = nullptr);

  // Bytes of activations and scratch this object holds.
  int64_t workspace_bytes() const;
  // The same before anything exists: activations stored as `activation`
  // (ops::Backend::ActivationType), max_tokens and max_logit_rows of `options`.
  static int64_t WorkspaceBytes(const ModelConfig& config, const ForwardOptions& options,
                                DType activation);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
