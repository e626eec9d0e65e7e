// One virtual function per op, so that the forward pass (model/forward.cc) is written once and runs
// on any backend. ReferenceBackend and CpuBackend are here; CUDA brings its own.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "ops/compressor/compressor.h"
#include "ops/experts/experts.h"
#include "ops/head/head.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/indexer/indexer.h"
#include "ops/linear/linear.h"
#include "ops/norm_rope_insert/norm_rope_insert.h"
#include "ops/output_projection/output_projection.h"
#include "ops/router/router.h"
#include "ops/sampling/sampling.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

class Backend {
 public:
  virtual ~Backend() = default;

  // Memory where this backend computes, 64-byte aligned and zero-filled; it lives as long as the
  // backend. Called while a model is set up, never by a step.
  virtual std::byte* Allocate(int64_t bytes) = 0;
  // How activations are stored (numerics.h): float32 on the CPU.
  virtual DType ActivationType(Numerics) const { return DType::kF32; }
  // Copies `bytes` from where this backend computes to host memory, after all work submitted so
  // far.
  virtual void ToHost(void* host, const void* data, int64_t bytes) = 0;
  // The other way, in order with the work submitted; `host` may change once this returns.
  virtual void FromHost(void* data, const void* host, int64_t bytes) = 0;
  // memmove and memset of this backend's memory, in order with the work submitted.
  virtual void Copy(void* to, const void* from, int64_t bytes) = 0;
  virtual void Fill(void* data, uint8_t value, int64_t bytes) = 0;
  // Waits for all work submitted so far.
  virtual void Wait() {}

  // Parts of a step that do not need each other. What follows Branch(lane) depends on what came
  // before the first Branch, on the same lane and, after Await(other), on what `other` holds by
  // then; Join ends all lanes: what follows depends on all of them. Lanes write to different
  // memory. A backend may run everything in the order of the calls, as these defaults do.
  static constexpr int kLanes = 3;
  virtual void Branch(int /*lane*/) {}
  virtual void Await(int /*other*/) {}
  virtual void Join() {}

  // What follows, up to the next call, belongs to this step.
  virtual void BeginStep(const StepView&) {}
  // table [T, 64]: RopeTableRow at every token's position; built once per step.
  virtual void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) = 0;
  virtual void Embed(const EmbedArgs&) = 0;
  virtual void Linear(const LinearArgs&) = 0;
  // Whether products of one x, which do not need each other, are computed at once by
  // LinearTogether. Else each is better off on its own, beside other parts of the step.
  virtual bool TakesTogether(std::span<const LinearArgs>) const { return false; }
  virtual void LinearTogether(std::span<const LinearArgs> products) {
    for (const LinearArgs& product : products) Linear(product);
  }
  virtual void RmsNorm(const RmsNormArgs&) = 0;
  // Whether NormRopeInsert takes `step` and `ring` for this step, and does what WindowCommit would.
  virtual bool InsertCommits(const StepView&) const { return false; }
  virtual void NormRopeInsert(const NormRopeInsertArgs&) = 0;
  virtual void WindowCommit(const WindowCommitArgs&) = 0;
  virtual void Compressor(const CompressorArgs&) = 0;
  virtual void Indexer(const IndexerArgs&) = 0;
  virtual void SparseAttention(const SparseAttentionArgs&) = 0;
  virtual void OutputProjection(const OutputProjectionArgs&) = 0;
  virtual void HyperConnection(const HyperConnectionArgs&) = 0;
  virtual void Router(const RouterArgs&) = 0;
  // The product that gives the router's logits, and Router: gate.y is route.logits, which a backend
  // that computes both together need not write.
  virtual void GateAndRoute(const LinearArgs& gate, const RouterArgs& route) {
    Linear(gate);
    Router(route);
  }
  virtual void Experts(const ExpertsArgs&) = 0;
  virtual void Head(const HeadArgs&) = 0;
  virtual void Sample(const SampleBatchArgs&) = 0;
};

// The two backends that compute in host memory.
class HostBackend : public Backend {
 public:
  std::byte* Allocate(int64_t bytes) override;
  void ToHost(void* host, const void* data, int64_t bytes) override;
  void FromHost(void* data, const void* host, int64_t bytes) override;
  void Copy(void* to, const void* from, int64_t bytes) override;
  void Fill(void* data, uint8_t value, int64_t bytes) override;

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> memory_;
};

// The values of a float32 or bfloat16 matrix, row after row, copied to host memory.
std::vector<float> ToHostFloats(Backend& backend, const MatrixView& matrix);

std::unique_ptr<Backend> MakeReferenceBackend();
std::unique_ptr<Backend> MakeCpuBackend(ThreadPool& pool);  // borrows the pool

}  // namespace fathom::ops
