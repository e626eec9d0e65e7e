#include "ops/backend.h"

namespace fathom::ops {
namespace {

class ReferenceBackend final : public HostBackend {
 public:
  void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) override {
    for (int64_t t = 0; t < step.num_tokens; ++t) {
      RopeTableRow(rope, step.position[t], table + t * kRopeDim);
    }
  }
  void Embed(const EmbedArgs& args) override { EmbedReference(args); }
  void Linear(const LinearArgs& args) override { LinearReference(args); }
  void RmsNorm(const RmsNormArgs& args) override { RmsNormReference(args); }
  void NormRopeInsert(const NormRopeInsertArgs& args) override { NormRopeInsertReference(args); }
  void WindowCommit(const WindowCommitArgs& args) override { WindowCommitReference(args); }
  void Compressor(const CompressorArgs& args) override { CompressorReference(args); }
  void Indexer(const IndexerArgs& args) override { IndexerReference(args); }
  void SparseAttention(const SparseAttentionArgs& args) override { SparseAttentionReference(args); }
  void OutputProjection(const OutputProjectionArgs& args) override {
    OutputProjectionReference(args);
  }
  void HyperConnection(const HyperConnectionArgs& args) override { HyperConnectionReference(args); }
  void Router(const RouterArgs& args) override { RouterReference(args); }
  void Experts(const ExpertsArgs& args) override { ExpertsReference(args); }
  void Head(const HeadArgs& args) override { HeadReference(args); }
  void Sample(const SampleBatchArgs& args) override { SampleBatchReference(args); }
};

}  // namespace

std::unique_ptr<Backend> MakeReferenceBackend() {
  return std::make_unique<ReferenceBackend>();
}

}  // namespace fathom::ops
