#include "model/dummy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <new>
#include <string_view>
#include <vector>

#include "model/tensor_names.h"

namespace fathom {
namespace {

// The k-th output of the SplitMix64 sequence that starts at `key`: any element on its own.
uint64_t Draw(uint64_t key, uint64_t k) {
  uint64_t z = key + (k + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t KeyOf(uint64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return Draw(hash, seed);
}

// Nearly normal, mean 0, variance 1: the sum of four uniform 16-bit numbers.
float Normal(uint64_t bits) {
  const int64_t sum = static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                           (bits >> 32 & 0xffff) + (bits >> 48));
  // Variance of the sum: 4 (2^32 - 1) / 12, so sigma = 2^16 / sqrt(3).
  return static_cast<float>(sum - 2 * 65535) * (1.7320508f / 65536.0f);
}

// Rms of the FP8 codes below: 64 leaves seven times sigma under the largest code, 448.
constexpr float kFp8Rms = 64.0f;
// Rms of uniformly drawn FP4 codes: sqrt((0 + .25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8).
constexpr float kFp4Rms = 2.926f;

// 256 equally likely FP8 codes that follow a normal distribution.
std::array<uint8_t, 256> NormalFp8Codes() {
  std::array<uint8_t, 256> codes{};
  for (int i = 0; i < 256; ++i) {
    // Quantile by bisection of the distribution function; once per run.
    const double want = (i + 0.5) / 256;
    double low = -8, high = 8;
    for (int step = 0; step < 60; ++step) {
      const double middle = (low + high) / 2;
      (0.5 * std::erfc(-middle / std::sqrt(2.0)) < want ? low : high) = middle;
    }
    codes[i] = F32ToE4m3(static_cast<float>(low) * kFp8Rms);
  }
  return codes;
}

enum class Fill { kBytes, kFp8Codes, kScale, kNormalBf16, kNormalF32, kRouting };

struct Recipe {
  Fill fill = Fill::kBytes;
  float mean = 0;
  float deviation = 1;
  int exponent = 0;  // kScale: the usual scale is 2^exponent, some are half of it
};

bool Ends(std::string_view name, std::string_view suffix) {
  return name.ends_with(suffix);
}

int ScaleExponent(float code_rms, int64_t in) {
  return static_cast<int>(
      std::lround(std::log2(1.0 / (code_rms * std::sqrt(static_cast<double>(in))))));
}

Recipe RecipeOf(const ExpectedTensor& tensor, DType weight_dtype, int64_t in) {
  const std::string_view name = tensor.name;
  const float fan_in = 1.0f / std::sqrt(static_cast<float>(in));
  switch (tensor.dtype) {
    case DType::kI64: return {Fill::kRouting};
    case DType::kI8: return {Fill::kBytes};
    case DType::kF8E4M3: return {Fill::kFp8Codes};
    case DType::kF8E8M0:
      return {Fill::kScale, 0, 1,
              ScaleExponent(weight_dtype == DType::kI8 ? kFp4Rms : kFp8Rms, in)};
    case DType::kBF16:
      if (tensor.shape.size() == 1) return {Fill::kNormalBf16, 1.0f, 0.05f};  // norms
      if (name == "embed.weight") return {Fill::kNormalBf16, 0.0f, 1.0f};
      return {Fill::kNormalBf16, 0.0f, fan_in};
    default: break;
  }
  if (Ends(name, "_fn")) return {Fill::kNormalF32, 0.0f, fan_in};
  if (Ends(name, "_scale")) return {Fill::kNormalF32, 1.0f, 0.05f};
  if (Ends(name, "gate.bias")) return {Fill::kNormalF32, 0.0f, 0.02f};
  return {Fill::kNormalF32, 0.0f, 0.5f};  // hc base, ape, sinks
}

struct Task {
  Recipe recipe;
  uint64_t key = 0;
  std::byte* data = nullptr;
  int64_t elements = 0;  // rows for kRouting
  int experts = 0;       // kRouting
  int top_k = 0;
};

// Distinct experts of one token: draws repeat until a new one comes.
void FillRoutingRow(const Task& task, int64_t token) {
  int64_t* row = reinterpret_cast<int64_t*>(task.data) + token * task.top_k;
  const uint64_t key = Draw(task.key, static_cast<uint64_t>(token));
  uint64_t k = 0;
  for (int i = 0; i < task.top_k;) {
    row[i] = static_cast<int64_t>(Draw(key, k++) % static_cast<uint64_t>(task.experts));
    if (std::find(row, row + i, row[i]) == row + i) ++i;
  }
}

// Elements [begin, end); begin is a multiple of 8.
void FillRange(const Task& task, int64_t begin, int64_t end) {
  static const std::array<uint8_t, 256> kCodes = NormalFp8Codes();
  const Recipe& recipe = task.recipe;
  switch (recipe.fill) {
    case Fill::kRouting:
      for (int64_t i = begin; i < end; ++i) FillRoutingRow(task, i);
      return;
    case Fill::kNormalBf16:
    case Fill::kNormalF32:
      for (int64_t i = begin; i < end; ++i) {
        const float value =
            recipe.mean + recipe.deviation * Normal(Draw(task.key, static_cast<uint64_t>(i)));
        if (recipe.fill == Fill::kNormalF32) reinterpret_cast<float*>(task.data)[i] = value;
        else reinterpret_cast<bf16_t*>(task.data)[i] = F32ToBf16(value);
      }
      return;
    default: break;
  }
  for (int64_t i = begin; i < end; i += 8) {  // one draw makes eight bytes
    const uint64_t bits = Draw(task.key, static_cast<uint64_t>(i / 8));
    for (int64_t j = i; j < std::min(end, i + 8); ++j) {
      const uint8_t byte = static_cast<uint8_t>(bits >> (8 * (j - i)));
      uint8_t value = byte;
      if (recipe.fill == Fill::kFp8Codes) value = kCodes[byte];
      if (recipe.fill == Fill::kScale) {
        value = static_cast<uint8_t>(std::clamp(127 + recipe.exponent - (byte & 1), 0, 254));
      }
      task.data[j] = std::byte{value};
    }
  }
}

}  // namespace

Expected<TensorSet> DummyTensors(ModelConfig& config, uint64_t seed, ThreadPool& pool) {
  if (config.expert_format == ExpertFormat::kUnknown) config.expert_format = ExpertFormat::kFp4;
  const std::vector<ExpectedTensor> tensors = ExpectedTensors(config);

  TensorSet set;
  int64_t bytes = 0;  // of the main model, every tensor on its own cache lines
  const auto padded = [](int64_t n) { return (n + 63) / 64 * 64; };
  for (const ExpectedTensor& tensor : tensors) {
    ++set.tensor_count;
    set.total_bytes += tensor.bytes();
    if (!tensor.name.starts_with("mtp.")) bytes += padded(tensor.bytes());
  }
  void* base = ::operator new (static_cast<size_t>(bytes), std::align_val_t{64}, std::nothrow);
  if (base == nullptr) {
    return Fail(Code::kResourceExhausted, "dummy weights need {} bytes of memory", bytes);
  }
  set.storage =
      std::shared_ptr<void>(base, [](void* p) { ::operator delete (p, std::align_val_t{64}); });

  constexpr int64_t kPiece = 1 << 16;  // elements; a multiple of 8
  struct Piece {
    size_t task;
    int64_t begin;
  };
  std::vector<Task> tasks;
  std::vector<Piece> pieces;
  std::byte* next = static_cast<std::byte*>(base);
  DType weight_dtype = DType::kBF16;
  int64_t in = 1;
  for (const ExpectedTensor& tensor : tensors) {
    if (tensor.name.starts_with("mtp.")) continue;
    if (tensor.dtype != DType::kF8E8M0) {  // a scale follows its weight and needs its width
      weight_dtype = tensor.dtype;
      in = tensor.shape.back() * (tensor.dtype == DType::kI8 ? 2 : 1);
    }
    Task task;
    task.recipe = RecipeOf(tensor, weight_dtype, in);
    task.key = KeyOf(seed, tensor.name);
    task.data = next;
    task.elements =
        tensor.dtype == DType::kI64 ? tensor.shape[0] : tensor.bytes() / ElementBytes(tensor.dtype);
    task.experts = config.num_experts;
    task.top_k = config.experts_per_token;
    for (int64_t at = 0; at < task.elements; at += kPiece) pieces.push_back({tasks.size(), at});
    tasks.push_back(task);
    set.tensors.emplace(tensor.name,
                        TensorInfo{tensor.name, tensor.dtype, tensor.shape, next, tensor.bytes()});
    next += padded(tensor.bytes());
  }
  pool.ParallelFor(static_cast<int64_t>(pieces.size()), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const Task& task = tasks[pieces[i].task];
      FillRange(task, pieces[i].begin, std::min(task.elements, pieces[i].begin + kPiece));
    }
  });
  return set;
}

}  // namespace fathom
