// Captured chains of kernels that wait for each other, as in a decode step of few tokens of
// V4-Flash. Every link has weights of its own, over 160 MiB in a chain: the L2 cache holds none of
// them when they come. Prints CSV:
//
//   chain_cuda_bench [--tokens N]        (default 1; up to 32)
//
// us is the time of a link, median of repeats of several launches of the whole chain; bytes are
// those of the weights that a link reads (of the experts that are chosen), of its inputs and of its
// outputs; bound_us is their time at 4.30 TB/s; share = bound_us / us. "-" where a kernel does not
// take the tokens.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ops/cuda/cuda_graph.h"
#include "ops/experts/cuda.h"
#include "ops/hyper_connection/cuda.h"
#include "ops/linear/cuda.h"
#include "ops/output_projection/cuda.h"
#include "ops/router/cuda.h"

namespace fathom::ops {
namespace {

constexpr double kBytesPerUs = 4.30e6;
constexpr int64_t kChainBytes = int64_t{160} << 20;
constexpr int kFewestLinks = 16;
constexpr int kLaunches = 4, kRepeats = 15;
// V4-Flash, with fewer experts than its 256 to choose from: the weights of those chosen count.
constexpr int64_t kHidden = 4096, kQueryRank = 1024, kInner = 2048, kOutputRank = 8192;
constexpr int kHeads = 64, kGroups = 8, kTopK = 6, kGateExperts = 256;
constexpr int kExperts = 64, kLayers = 4, kChoices = 4;  // choices of experts in a layer

std::mt19937& Rng() {
  static std::mt19937 rng(1);
  return rng;
}

// Device memory until the end of the program, zero-filled.
template <class T>
T* Memory(int64_t count) {
  void* data = nullptr;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  FATHOM_CUDA_CHECK(cudaMalloc(&data, bytes));
  FATHOM_CUDA_CHECK(cudaMemset(data, 0, bytes));
  return static_cast<T*>(data);
}
template <class T>
T* Uploaded(const std::vector<T>& host) {
  T* const data = Memory<T>(std::ssize(host));
  FATHOM_CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// bf16 values of order 1.
MatrixView Activations(int64_t rows, int64_t cols) {
  std::normal_distribution<float> normal;
  std::vector<bf16_t> host(static_cast<size_t>(rows * cols));
  for (bf16_t& v : host) v = F32ToBf16(normal(Rng()));
  return {Uploaded(host), DType::kBF16, rows, cols, cols};
}

// Random finite codes of a format, the same ones for every weight.
const std::vector<uint32_t>& Codes(WeightFormat format, int64_t bytes) {
  static std::vector<uint32_t> codes[4];
  std::vector<uint32_t>& of = codes[static_cast<int>(format)];
  const uint32_t mask = format == WeightFormat::kFp4Block32 ? 0xffffffffu
                        : format == WeightFormat::kBF16     ? 0xbfffbfffu
                                                            : 0xf7f7f7f7u;
  while (std::ssize(of) * 4 < bytes) of.push_back(static_cast<uint32_t>(Rng()()) & mask);
  return of;
}

int64_t CodeBytes(WeightFormat format, int64_t out, int64_t in) {
  return format == WeightFormat::kBF16          ? out * in * 2
         : format == WeightFormat::kFp8Block128 ? out * in
                                                : out * in / 2;
}
int64_t StoredBytes(WeightFormat format, int64_t out, int64_t in) {
  const int64_t scales = format == WeightFormat::kBF16          ? 0
                         : format == WeightFormat::kFp8Block128 ? out * in / (128 * 128)
                                                                : out * in / 32;
  return CodeBytes(format, out, in) + scales;
}

// Not packed yet; small scales.
LinearWeight HostWeight(WeightFormat format, int64_t out, int64_t in) {
  static const std::vector<uint8_t> scales(static_cast<size_t>(kHidden * kOutputRank / 32), 118);
  return {.format = format,
          .out = out,
          .in = in,
          .data = Codes(format, CodeBytes(format, out, in)).data(),
          .scale = scales.data(),
          .packed = nullptr};
}

// A product's weights, one for each link of a chain.
struct Weights {
  WeightFormat format;
  int64_t out, in;
  std::vector<LinearWeight> links;

  Weights(WeightFormat f, int64_t o, int64_t i) : format(f), out(o), in(i) {
    const int64_t count = std::max<int64_t>(kFewestLinks, kChainBytes / bytes() + 1);
    for (int64_t n = 0; n < count; ++n) {
      LinearWeight weight = HostWeight(format, out, in);
      PackLinearCuda(weight);
      links.push_back(std::move(weight));
    }
  }
  int64_t bytes() const { return StoredBytes(format, out, in); }
  int count() const { return static_cast<int>(links.size()); }
};

// A layer's experts.
struct Experts {
  std::vector<ExpertWeights> routed;
  ExpertWeights shared;

  Experts() {
    const auto bind = [](WeightFormat format) {
      const LinearWeight up = HostWeight(format, kInner, kHidden);
      const LinearWeight down = HostWeight(format, kHidden, kInner);
      return ExpertWeights{up, down, up};
    };
    routed.assign(kExperts, bind(WeightFormat::kFp4Block32));
    shared = bind(WeightFormat::kFp8Block128);
    PackExpertsCuda(routed.data(), kExperts, shared);
  }
};

class Bench {
 public:
  Bench(CudaBackend& backend, int64_t tokens) : backend_(backend), tokens_(tokens) {
    for (int i = 0; i < kLayers; ++i) layers_.push_back(std::make_unique<Experts>());
    std::vector<int32_t> ids(kExperts);
    for (int e = 0; e < kExperts; ++e) ids[e] = e;
    for (int i = 0; i < kLayers * kChoices; ++i) {
      std::vector<int32_t> chosen;
      for (int64_t t = 0; t < tokens_; ++t) {
        std::shuffle(ids.begin(), ids.end(), Rng());
        std::sort(ids.begin(), ids.begin() + kTopK);
        chosen.insert(chosen.end(), ids.begin(), ids.begin() + kTopK);
      }
      chosen_.push_back(Uploaded(chosen));
      distinct_ += static_cast<double>(std::set<int32_t>(chosen.begin(), chosen.end()).size());
    }
    distinct_ /= kLayers * kChoices;
    std::vector<float> fn(24 * 4 * kHidden);
    std::normal_distribution<float> normal(0.0f, 0.01f);
    for (float& v : fn) v = normal(Rng());
    for (int i = 0; i < gate_.count(); ++i) fn_.push_back(Uploaded(fn));
    expert_scratch_ = Memory<char>(ExpertsCudaScratchBytes(ExpertsOf(0), tokens_));
  }

  void Run() {
    Time("wq_a", Bytes(wq_a_, qa_), wq_a_.count(), [&](int i) { Product(wq_a_, i, z_, qa_); });
    Time("wq_b", Bytes(wq_b_, q_), wq_b_.count(), [&](int i) { Product(wq_b_, i, qa_, q_); });
    Time("rotation; wo_a", Bytes(wo_a_, grouped_) + 2.0 * tokens_ * (q_.cols - wo_a_.in),
         wo_a_.count(), [&](int i) { Grouped(i); });
    Time("wo_b", Bytes(wo_b_, o_), wo_b_.count(), [&](int i) { Product(wo_b_, i, grouped_, o_); });

    const double routes = 8.0 * tokens_ * kTopK;
    const double gate = Bytes(gate_, logits_), router = 4.0 * tokens_ * logits_.cols + routes;
    const int links = gate_.count();
    Time("gate", gate, links, [&](int i) { LinearCuda(GateOf(i), scratch_, stream()); });
    Time("router", router, links, [&](int i) { RouterCuda(RouteOf(i), stream()); });
    Time("gate and router apart", gate + router, links, [&](int i) { Apart(i); });
    const double together = gate - 4.0 * tokens_ * logits_.cols + routes;
    TimeTogether("gate and router together", together, links, [&](int i) { Together(i); });
    // Behind the kernel that a step has in front of them, which writes their input.
    const double seam = 24.0 * 4 * kHidden * 4 + 22.0 * tokens_ * kHidden;
    Time("seam", seam, links, [&](int i) { Seam(i); });
    Time("seam; gate and router apart", seam + gate + router, links, [&](int i) {
      Seam(i);
      Apart(i);
    });
    TimeTogether("seam; gate and router together", seam + together, links, [&](int i) {
      Seam(i);
      Together(i);
    });

    Time("experts", ExpertBytes(), kLayers * kChoices,
         [&](int i) { ExpertsCuda(ExpertsOf(i), expert_scratch_, stream()); });
    // A layer's products and the choice of experts.
    const double products = Bytes(wq_a_, qa_) + Bytes(wq_b_, q_) + Bytes(wo_a_, grouped_) +
                            2.0 * tokens_ * (q_.cols - wo_a_.in) + Bytes(wo_b_, o_) + ExpertBytes();
    const auto attention = [&](int i) {
      Product(wq_a_, i, z_, qa_);
      Product(wq_b_, i, qa_, q_);
      Grouped(i);
      Product(wo_b_, i, grouped_, o_);
    };
    Time("layer; gate and router apart", products + gate + router, kLayers * kChoices, [&](int i) {
      attention(i);
      Apart(i);
      ExpertsCuda(ExpertsOf(i), expert_scratch_, stream());
    });
    TimeTogether("layer; gate and router together", products + together, kLayers * kChoices,
                 [&](int i) {
                   attention(i);
                   Together(i);
                   ExpertsCuda(ExpertsOf(i), expert_scratch_, stream());
                 });
  }

 private:
  CudaStream stream() const { return backend_.stream(); }

  MatrixView Empty(int64_t cols, DType type) const {
    return {Memory<char>(tokens_ * cols * ElementBytes(type)), type, tokens_, cols, cols};
  }

  // Of a link: its weight, its rows in bf16 and out.
  double Bytes(const Weights& w, const MatrixView& y) const {
    return static_cast<double>(w.bytes() + tokens_ * (2 * w.in + y.cols * ElementBytes(y.dtype)));
  }
  double ExpertBytes() const {
    const auto of = [](WeightFormat f) { return 3.0 * StoredBytes(f, kInner, kHidden); };
    return distinct_ * of(WeightFormat::kFp4Block32) + of(WeightFormat::kFp8Block128) +
           4.0 * tokens_ * kHidden;
  }

  void Product(const Weights& w, int link, const MatrixView& x, const MatrixView& y) const {
    LinearCuda({.x = x, .weight = &w.links[link], .y = y}, scratch_, stream());
  }
  void Grouped(int link) const {
    const OutputProjectionArgs args = {.o = q_,
                                       .rope = rope_,
                                       .heads = kHeads,
                                       .groups = kGroups,
                                       .wo_a = &wo_a_.links[link],
                                       .y = grouped_};
    OutputProjectionCuda(args, scratch_, stream());
  }
  LinearArgs GateOf(int link) const {
    return {.x = z_, .weight = &gate_.links[link], .y = logits_, .round_output = false};
  }
  RouterArgs RouteOf(int link) const {
    return {.logits = logits_,
            .bias = bias_ + link % kFewestLinks * kGateExperts,
            .top_k = kTopK,
            .scale = 2.5f,
            .experts = routed_,
            .weights = route_weights_};
  }
  void Apart(int link) const {
    LinearCuda(GateOf(link), scratch_, stream());
    RouterCuda(RouteOf(link), stream());
  }
  void Together(int link) const { GateAndRouteCuda(GateOf(link), RouteOf(link), stream()); }
  void Seam(int link) const {
    const HyperConnectionSite site = {fn_[link], base_, hc_scale_, 24};
    HyperConnectionCuda({.x = x_,
                         .o = o_,
                         .site = &site,
                         .post = post_,
                         .comb = comb_,
                         .u = u_,
                         .norm = norm_,
                         .z = z_},
                        stream());
  }
  ExpertsArgs ExpertsOf(int link) const {
    const Experts& layer = *layers_[link % kLayers];
    return {.z = z_,
            .experts = layer.routed.data(),
            .num_experts = kExperts,
            .shared = &layer.shared,
            .chosen = chosen_[link],
            .weights = mixture_,
            .top_k = kTopK,
            .y = o_};
  }

  void Time(const std::string& name, double bytes, int links,
            const std::function<void(int)>& link) const {
    FATHOM_CUDA_CHECK(cudaDeviceSynchronize());
    const CudaGraph graph = CudaGraph::Capture(backend_, [&] {
      for (int i = 0; i < links; ++i) link(i);
    });
    cudaEvent_t begin = nullptr, end = nullptr;
    FATHOM_CUDA_CHECK(cudaEventCreate(&begin));
    FATHOM_CUDA_CHECK(cudaEventCreate(&end));
    std::vector<double> us;
    for (int i = 0; i < kRepeats + 2; ++i) {
      FATHOM_CUDA_CHECK(cudaEventRecord(begin, stream()));
      for (int n = 0; n < kLaunches; ++n) graph.Launch();
      FATHOM_CUDA_CHECK(cudaEventRecord(end, stream()));
      FATHOM_CUDA_CHECK(cudaEventSynchronize(end));
      float ms = 0;
      FATHOM_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i >= 2) us.push_back(1e3 * static_cast<double>(ms) / (kLaunches * links));
    }
    FATHOM_CUDA_CHECK(cudaEventDestroy(begin));
    FATHOM_CUDA_CHECK(cudaEventDestroy(end));
    std::nth_element(us.begin(), us.begin() + kRepeats / 2, us.end());
    const double median = us[kRepeats / 2], bound = bytes / kBytesPerUs;
    std::printf("%s,%.2f,%.0f,%.2f,%.3f\n", name.c_str(), median, bytes, bound, bound / median);
    std::fflush(stdout);
  }

  void TimeTogether(const std::string& name, double bytes, int links,
                    const std::function<void(int)>& link) const {
    if (GateAndRouteCudaTakes(GateOf(0), RouteOf(0))) return Time(name, bytes, links, link);
    std::printf("%s,-,-,-,-\n", name.c_str());
  }

  CudaBackend& backend_;
  const int64_t tokens_;
  const Weights wq_a_{WeightFormat::kFp8Block128, kQueryRank, kHidden};
  const Weights wq_b_{WeightFormat::kFp8Block128, int64_t{kHeadDim} * kHeads, kQueryRank};
  const Weights wo_a_{WeightFormat::kFp8Block128, kOutputRank,
                      int64_t{kHeadDim} * kHeads / kGroups};
  const Weights wo_b_{WeightFormat::kFp8Block128, kHidden, kOutputRank};
  const Weights gate_{WeightFormat::kBF16, kGateExperts, kHidden};
  std::vector<std::unique_ptr<Experts>> layers_;
  std::vector<int32_t*> chosen_;  // of each link [tokens, kTopK]
  double distinct_ = 0;           // experts that a link's tokens choose, on average

  const MatrixView z_ = Activations(tokens_, kHidden);
  const MatrixView qa_ = Activations(tokens_, kQueryRank);
  const MatrixView q_ = Activations(tokens_, int64_t{kHeadDim} * kHeads);
  float* const rope_ =
      Uploaded(std::vector<float>(static_cast<size_t>(tokens_ * kRopeDim), 0.70710678f));
  const MatrixView grouped_ = Activations(tokens_, kOutputRank);
  const MatrixView o_ = Empty(kHidden, DType::kBF16);
  const MatrixView logits_ = Empty(kGateExperts, DType::kF32);
  float* const bias_ = Memory<float>(int64_t{kFewestLinks} * kGateExperts);
  float* const mixture_ = Uploaded(std::vector<float>(static_cast<size_t>(tokens_ * kTopK), 0.25f));
  std::vector<float*> fn_;  // of each seam [24, 4 * kHidden]
  const MatrixView x_ = Activations(tokens_, 4 * kHidden);
  const MatrixView u_ = Empty(kHidden, DType::kBF16);
  float* const post_ = Uploaded(std::vector<float>(static_cast<size_t>(tokens_ * 4), 1.0f));
  float* const comb_ = Uploaded(std::vector<float>(static_cast<size_t>(tokens_ * 16), 0.25f));
  float* const base_ = Memory<float>(24);
  float* const hc_scale_ = Uploaded(std::vector<float>(3, 1.0f));
  float* const norm_ = Uploaded(std::vector<float>(kHidden, 1.0f));
  int32_t* const routed_ = Memory<int32_t>(tokens_ * kTopK);
  float* const route_weights_ = Memory<float>(tokens_ * kTopK);
  char* const scratch_ = Memory<char>(LinearCudaScratchBytes(tokens_, int64_t{kHeadDim} * kHeads));
  char* expert_scratch_ = nullptr;
};

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using fathom::ops::CudaBackend;
  int64_t tokens = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--tokens") tokens = std::atoll(argv[i + 1]);
  }
  if (tokens < 1 || tokens > 32) {
    std::fprintf(stderr, "chain_cuda_bench: --tokens takes 1 to 32\n");
    return 1;
  }
  auto backend = CudaBackend::Make();
  if (!backend) {
    std::fprintf(stderr, "%s\n", backend.error().message.c_str());
    return 1;
  }
  std::printf("chain,us,bytes,bound_us,share\n");
  fathom::ops::Bench(**backend, tokens).Run();
}
