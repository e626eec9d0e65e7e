#include "cache/plan_compare.h"

#include "ops/numerics.h"

namespace fathom {
namespace {

constexpr int64_t kBf16Bytes = 2;
constexpr int kV32Layers = 61;
constexpr int64_t kV32Channels = 576 + 128;  // latent row and indexer key

}  // namespace

Expected<Comparison> Compare(const std::string& name, const ModelConfig& config,
                             const SequenceBytes& sequence, int64_t tokens) {
  Comparison out;
  out.name = name;
  if (name == "v3.2") {
    out.what = "DeepSeek-V3.2: 576 latent and 128 index channels, bf16";
    out.layers = kV32Layers;
    out.bytes_per_token = kV32Layers * kV32Channels * kBf16Bytes;
  } else if (name == "mha") {
    out.what = fmt::format("multi-head attention: {} heads of {}, K and V, bf16", config.num_heads,
                           ops::kHeadDim);
    out.layers = config.num_layers;
    out.bytes_per_token =
        int64_t{config.num_layers} * config.num_heads * ops::kHeadDim * 2 * kBf16Bytes;
  } else {
    return FailParam(Code::kInvalidArgument, "--compare", "--compare '{}' is not one of v3.2, mha",
                     name);
  }
  out.bytes = out.bytes_per_token * tokens;
  out.ratio = static_cast<double>(out.bytes) / static_cast<double>(sequence.total());
  // No compressed row is complete in the first three tokens.
  if (sequence.rows > 0) {
    out.ratio_rows = static_cast<double>(out.bytes) / static_cast<double>(sequence.rows);
  }
  return out;
}

}  // namespace fathom
