#include "ops/backend.h"

namespace fathom::ops {
namespace {

class CpuBackend final : public HostBackend {
 public:
  explicit CpuBackend(ThreadPool& pool) : pool_(pool) {}

  void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) override {
    pool_.ParallelFor(step.num_tokens, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        RopeTableRow(rope, step.position[t], table + t * kRopeDim);
      }
    });
  }
  void Embed(const EmbedArgs& args) override { EmbedCpu(args, pool_); }
  void Linear(const LinearArgs& args) override { LinearCpu(args, pool_); }
  void RmsNorm(const RmsNormArgs& args) override { RmsNormCpu(args, pool_); }
  void NormRopeInsert(const NormRopeInsertArgs& args) override { NormRopeInsertCpu(args, pool_); }
  void WindowCommit(const WindowCommitArgs& args) override { WindowCommitCpu(args, pool_); }
  void Compressor(const CompressorArgs& args) override { CompressorCpu(args, pool_); }
  void Indexer(const IndexerArgs& args) override { IndexerCpu(args, pool_); }
  void SparseAttention(const SparseAttentionArgs& args) override {
    SparseAttentionCpu(args, pool_);
  }
  void OutputProjection(const OutputProjectionArgs& args) override {
    OutputProjectionCpu(args, pool_);
  }
  void HyperConnection(const HyperConnectionArgs& args) override {
    HyperConnectionCpu(args, pool_);
  }
  void Router(const RouterArgs& args) override { RouterCpu(args, pool_); }
  void Experts(const ExpertsArgs& args) override { ExpertsCpu(args, pool_); }
  void Head(const HeadArgs& args) override { HeadCpu(args, pool_); }
  void Sample(const SampleBatchArgs& args) override { SampleBatchCpu(args, pool_); }

 private:
  ThreadPool& pool_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(ThreadPool& pool) {
  return std::make_unique<CpuBackend>(pool);
}

}  // namespace fathom::ops
