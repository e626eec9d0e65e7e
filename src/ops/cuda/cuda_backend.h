// CudaBackend: the forward pass on one GPU. Work goes to one stream, between Branch and Join to
// three; nothing is allocated once a model is set up.
//
//   FATHOM_ASSIGN(auto backend, CudaBackend::Make());
//   FATHOM_TRY(UploadForCuda(weights, config, *backend));   // model/cuda_weights.h
//   Forward forward(config, weights, *backend, options);
//
// Weights keep their host addresses everywhere above the ops. Matrices carry their device form in
// LinearWeight::packed; for norms, sinks, biases, hyper-connection parameters, the hash tables and
// the embedding this class remembers which device address belongs to which host address.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "ops/backend.h"
#include "ops/cuda/device.h"

struct CUevent_st;

namespace fathom::ops {

// Bytes of device memory free and in all.
struct CudaMemory {
  int64_t free = 0;
  int64_t total = 0;
};

// What a CudaBackend computes together that the model computes one after the other, where the
// kernels can, and how it launches. Benches turn them off one by one; no result depends on them.
struct CudaFusions {
  bool gate = true;       // with the choice of experts
  bool one_token = true;  // the indexer of few tokens of short contexts: one launch
  bool commit = true;     // the keys of sequences of one token: into the ring as they are made
  bool products = true;   // of one input: one launch
  // One split of L1 and shared memory for all kernels of a step of up to kOneSplitTokens: one token
  // gained 1 % by it, 8 lost 0.8 %, 32 lost 1.6 %.
  bool one_split = true;
};
inline constexpr int kOneSplitTokens = 2;

class CudaBackend final : public Backend {
 public:
  // True when the process sees a device that the kernels run on (sm_90).
  static bool Available();
  // kUnavailable: no such device; says what was found.
  static Expected<std::unique_ptr<CudaBackend>> Make(const CudaFusions& fusions = {});
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  // Device memory that lives as long as the backend, 256-byte aligned, not cleared.
  // kResourceExhausted with the number of bytes and how many are free. `what` names the purpose.
  Expected<std::byte*> Reserve(int64_t bytes, std::string_view what);
  // From now on the device copy stands for `host` in the arguments of every op.
  void Stand(const void* host, const void* device) { device_of_[host] = device; }
  // From the next op on.
  void Fuse(const CudaFusions& fusions) { fusions_ = fusions; }
  // Reserves the scratch of everything `run` (a forward pass of the largest step) does, without
  // launching any of it: addresses in the step may be null. The ops of a lane share one scratch,
  // for they share a stream. Without this call it grows when an op needs more.
  void PlanScratch(const std::function<void()>& run);

  int64_t scratch_bytes() const;  // of all lanes
  // The stream of the lane at hand; outside of Branch and Join the one everything else follows.
  CudaStream stream() const { return lanes_[lane_].stream; }
  static CudaMemory Memory();

  std::byte* Allocate(int64_t bytes) override;
  DType ActivationType(Numerics numerics) const override {
    return numerics == Numerics::kProduct ? DType::kBF16 : DType::kF32;
  }
  void ToHost(void* host, const void* data, int64_t bytes) override;
  void FromHost(void* data, const void* host, int64_t bytes) override;
  void Copy(void* to, const void* from, int64_t bytes) override;
  void Fill(void* data, uint8_t value, int64_t bytes) override;
  void Wait() override;
  void Branch(int lane) override;
  void Await(int other) override;
  void Join() override;

  void BeginStep(const StepView& step) override;
  void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) override;
  void Embed(const EmbedArgs&) override;
  void Linear(const LinearArgs&) override;
  bool TakesTogether(std::span<const LinearArgs> products) const override;
  void LinearTogether(std::span<const LinearArgs> products) override;
  void RmsNorm(const RmsNormArgs&) override;
  bool InsertCommits(const StepView& step) const override;
  void NormRopeInsert(const NormRopeInsertArgs&) override;
  void WindowCommit(const WindowCommitArgs&) override;
  void Compressor(const CompressorArgs&) override;
  void Indexer(const IndexerArgs&) override;
  void SparseAttention(const SparseAttentionArgs&) override;
  void OutputProjection(const OutputProjectionArgs&) override;
  void HyperConnection(const HyperConnectionArgs&) override;
  void Router(const RouterArgs&) override;
  void GateAndRoute(const LinearArgs& gate, const RouterArgs& route) override;
  void Experts(const ExpertsArgs&) override;
  void Head(const HeadArgs&) override;
  // logits.rows is the most that is ever sampled at once.
  void Sample(const SampleBatchArgs&) override;

 private:
  explicit CudaBackend(const CudaFusions& fusions);

  // The device address that stands for a host address; null stays null.
  const void* Find(const void* host) const;
  template <class T>
  const T* At(const T* host) const {
    return static_cast<const T*>(Find(host));
  }
  HyperConnectionSite At(const HyperConnectionSite& site) const;
  void* Scratch(int64_t bytes);

  // A stream and what its kernels share. The stream of lane 0 is the step's.
  struct Lane {
    CudaStream stream = nullptr;
    CUevent_st* event = nullptr;
    void* scratch = nullptr;
    int64_t scratch_bytes = 0;
    bool active = false;  // has work that Join must wait for
  };
  CudaFusions fusions_;
  std::array<Lane, kLanes> lanes_;
  int lane_ = 0;
  bool branched_ = false;
  CUevent_st* fork_ = nullptr;
  std::vector<void*> memory_;
  std::unordered_map<const void*, const void*> device_of_;
  bool planning_ = false;
  // Copies from the host pass through pinned memory; `staged_` is the event after the last one.
  void* staging_ = nullptr;
  int64_t staging_bytes_ = 0;
  CUevent_st* staged_ = nullptr;
  // Sampling's lists and results on the host.
  void* sampling_ = nullptr;
  int64_t sampling_bytes_ = 0;
};

}  // namespace fathom::ops
