// A Backend that times another one, op by op: for benches and profiles.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "ops/backend.h"

namespace fathom::ops {

class TimedBackend final : public Backend {
 public:
  explicit TimedBackend(Backend& inner) : inner_(inner) {}

  std::byte* Allocate(int64_t bytes) override { return inner_.Allocate(bytes); }
  DType ActivationType(Numerics numerics) const override { return inner_.ActivationType(numerics); }
  void ToHost(void* host, const void* data, int64_t bytes) override {
    inner_.ToHost(host, data, bytes);
  }
  void FromHost(void* data, const void* host, int64_t bytes) override {
    inner_.FromHost(data, host, bytes);
  }
  void Copy(void* to, const void* from, int64_t bytes) override { inner_.Copy(to, from, bytes); }
  void Fill(void* data, uint8_t value, int64_t bytes) override { inner_.Fill(data, value, bytes); }
  void Wait() override { inner_.Wait(); }
  void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) override {
    Time("rope_tables", [&] { inner_.RopeTables(step, rope, table); });
  }
  void Embed(const EmbedArgs& args) override {
    Time("embed", [&] { inner_.Embed(args); });
  }
  // Linear products are told apart by their shape.
  void Linear(const LinearArgs& args) override {
    const std::string name =
        "linear " + std::to_string(args.weight->out) + "x" + std::to_string(args.weight->in);
    Time(name, [&] { inner_.Linear(args); });
  }
  void RmsNorm(const RmsNormArgs& args) override {
    Time("rms_norm", [&] { inner_.RmsNorm(args); });
  }
  void NormRopeInsert(const NormRopeInsertArgs& args) override {
    Time("norm_rope_insert", [&] { inner_.NormRopeInsert(args); });
  }
  void WindowCommit(const WindowCommitArgs& args) override {
    Time("window_commit", [&] { inner_.WindowCommit(args); });
  }
  void Compressor(const CompressorArgs& args) override {
    Time("compressor", [&] { inner_.Compressor(args); });
  }
  void Indexer(const IndexerArgs& args) override {
    Time("indexer", [&] { inner_.Indexer(args); });
  }
  void SparseAttention(const SparseAttentionArgs& args) override {
    const char* name = args.compressed.base == nullptr ? "sparse_attention swa"
                       : args.selected == nullptr      ? "sparse_attention hca"
                                                       : "sparse_attention csa";
    Time(name, [&] { inner_.SparseAttention(args); });
  }
  void OutputProjection(const OutputProjectionArgs& args) override {
    Time("output_projection", [&] { inner_.OutputProjection(args); });
  }
  void HyperConnection(const HyperConnectionArgs& args) override {
    Time("hyper_connection", [&] { inner_.HyperConnection(args); });
  }
  void Router(const RouterArgs& args) override {
    Time("router", [&] { inner_.Router(args); });
  }
  void Experts(const ExpertsArgs& args) override {
    Time("experts", [&] { inner_.Experts(args); });
  }
  void Head(const HeadArgs& args) override {
    Time("head", [&] { inner_.Head(args); });
  }
  void Sample(const SampleBatchArgs& args) override {
    Time("sampling", [&] { inner_.Sample(args); });
  }

  // Seconds per op since the last Reset.
  const std::map<std::string, double>& seconds() const { return seconds_; }
  void Reset() { seconds_.clear(); }

 private:
  template <class Fn>
  void Time(const std::string& name, Fn&& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    inner_.Wait();
    seconds_[name] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  Backend& inner_;
  std::map<std::string, double> seconds_;
};

}  // namespace fathom::ops
