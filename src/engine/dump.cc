#include "engine/dump.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

namespace fathom {
namespace {

constexpr std::array kLayerNames = {
    "streams",        "attn.in",        "attn.q_latent",  "attn.q",
    "attn.heads",     "attn.out",       "ffn.in",         "ffn.out",
    "router.experts", "router.weights", "hc_attn.post",   "hc_attn.comb",
    "hc_ffn.post",    "hc_ffn.comb",    "indexer.scores", "indexer.selected"};
constexpr std::string_view kLayerPrefix = "layers.";

constexpr int kStepTokens = 1024;

// Names a model has: an indexer exists in CSA layers only.
Status CheckName(const ModelConfig& config, const std::string& name) {
  if (name == "logits" || name == "embed") return {};
  if (name.starts_with(kLayerPrefix)) {
    const size_t dot = name.find('.', kLayerPrefix.size());
    const std::string number = name.substr(
        kLayerPrefix.size(), dot == std::string::npos ? dot : dot - kLayerPrefix.size());
    const bool digits =
        !number.empty() && number.size() < 6 &&
        std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (digits && dot != std::string::npos && std::stoi(number) < config.num_layers) {
      const std::string_view rest = std::string_view(name).substr(dot + 1);
      const bool known =
          std::find(kLayerNames.begin(), kLayerNames.end(), rest) != kLayerNames.end();
      const bool indexer = rest.starts_with("indexer.");
      if (known && (!indexer || config.kind(std::stoi(number)) == LayerKind::kCsa)) return {};
    }
  }
  std::string names;
  for (const std::string& known : TapNames()) names += " " + known;
  return FailParam(
      Code::kInvalidArgument, "--tensor",
      "tensor '{}' is not one this model has ({} layers, indexer in c4a layers); names are:{}",
      name, config.num_layers, names);
}

class Collector final : public Tap {
 public:
  Collector(const std::vector<std::string>& names, ops::Backend& backend) : backend_(backend) {
    for (const std::string& name : names) rows_[name];
  }

  bool Wants(std::string_view name) override { return rows_.find(name) != rows_.end(); }

  void Put(std::string_view name, const MatrixView& value) override {
    auto& rows = rows_.find(name)->second;
    if (value.dtype == DType::kI32) {
      for (int64_t t = 0; t < value.rows; ++t) {
        Row row{DType::kI32, {}, std::vector<int32_t>(static_cast<size_t>(value.cols))};
        backend_.ToHost(row.i32.data(), static_cast<const int32_t*>(value.data) + t * value.stride,
                        value.cols * int64_t{sizeof(int32_t)});
        rows.push_back(std::move(row));
      }
      return;
    }
    const std::vector<float> values = ops::ToHostFloats(backend_, value);
    for (int64_t t = 0; t < value.rows; ++t) {
      const auto begin = values.begin() + t * value.cols;
      rows.push_back({DType::kF32, {begin, begin + value.cols}, {}});
    }
  }

  // Rows [first, end) as one tensor; rows that grow with the position (indexer scores) are padded
  // with zeros.
  DumpedTensor Take(const std::string& name, int64_t first, int64_t streams) {
    auto& rows = rows_.find(name)->second;
    DumpedTensor out{name, {}, rows.empty() ? DType::kF32 : rows[0].dtype, {}, {}};
    size_t width = 0;
    for (const Row& row : rows) width = std::max({width, row.f32.size(), row.i32.size()});
    for (size_t t = static_cast<size_t>(first); t < rows.size(); ++t) {
      rows[t].f32.resize(out.dtype == DType::kF32 ? width : 0);
      rows[t].i32.resize(out.dtype == DType::kI32 ? width : 0);
      out.f32.insert(out.f32.end(), rows[t].f32.begin(), rows[t].f32.end());
      out.i32.insert(out.i32.end(), rows[t].i32.begin(), rows[t].i32.end());
    }
    const auto count = static_cast<int64_t>(rows.size()) - first;
    const auto columns = static_cast<int64_t>(width);
    const bool split = name == "embed" || name.ends_with(".streams") || name.ends_with(".comb");
    if (split) {
      out.shape = {count, streams, columns / streams};
    } else {
      out.shape = {count, columns};
    }
    return out;
  }

 private:
  struct Row {
    DType dtype;
    std::vector<float> f32;
    std::vector<int32_t> i32;
  };
  ops::Backend& backend_;
  std::map<std::string, std::vector<Row>, std::less<>> rows_;
};

}  // namespace

std::vector<std::string> TapNames() {
  std::vector<std::string> names = {"logits", "embed"};
  for (const char* name : kLayerNames) names.push_back(std::string("layers.*.") + name);
  return names;
}

Expected<std::vector<DumpedTensor>> Dump(const ModelConfig& config, const Weights& weights,
                                         ops::Backend& backend, const DumpRequest& request) {
  for (const std::string& name : request.tensors) FATHOM_TRY(CheckName(config, name));
  const auto total = static_cast<int64_t>(request.ids.size());
  if (total == 0) return Fail(Code::kInvalidArgument, "the list of token ids is empty");
  if (total > config.max_position_embeddings) {
    return Fail(Code::kContextLength, "{} token ids are more than the model's {} positions", total,
                config.max_position_embeddings);
  }
  const int64_t first = request.last > 0 ? std::max<int64_t>(0, total - request.last) : 0;
  ReplayOptions options;
  options.numerics = request.numerics;
  options.cache = request.cache;
  options.memory = request.memory;
  options.max_context = total;
  const int64_t chunk = std::min<int64_t>(request.chunk > 0 ? request.chunk : kStepTokens, total);
  options.max_step_tokens = static_cast<int>(chunk);
  FATHOM_ASSIGN(auto replay, Replay::Make(config, weights, backend, options));

  const bool wants_logits =
      std::find(request.tensors.begin(), request.tensors.end(), "logits") != request.tensors.end();
  std::vector<float> logits;
  Collector collector(request.tensors, backend);
  for (int64_t begin = 0; begin < total; begin += chunk) {
    const int64_t end = std::min(begin + chunk, total);
    const Replay::Chunk tokens{0, std::span(request.ids).subspan(begin, end - begin)};
    const bool rows = wants_logits && end > first;
    FATHOM_ASSIGN(const std::span<const float> out,
                  replay->Step({&tokens, 1}, rows ? Replay::Logits::kAll : Replay::Logits::kNone,
                               &collector));
    const int64_t skip = std::max<int64_t>(0, first - begin) * config.vocab_size;
    if (rows) logits.insert(logits.end(), out.begin() + skip, out.end());
  }

  std::vector<DumpedTensor> tensors;
  for (const std::string& name : request.tensors) {
    if (name == "logits") {
      tensors.push_back({name, {total - first, config.vocab_size}, DType::kF32, logits, {}});
    } else {
      tensors.push_back(collector.Take(name, first, ops::kStreams));
    }
  }
  return tensors;
}

}  // namespace fathom
