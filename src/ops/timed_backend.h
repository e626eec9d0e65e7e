// Backends around another one that look at every op by its name: for benches and profiles.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "ops/backend.h"

namespace fathom::ops {

// Hands every op to Call.
class NamedBackend : public Backend {
 public:
  explicit NamedBackend(Backend& inner) : inner_(inner) {}

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
  void BeginStep(const StepView& step) override { inner_.BeginStep(step); }
  void RopeTables(const StepView& step, const RopeFrequencies& rope, float* table) override {
    Call("rope_tables", [&] { inner_.RopeTables(step, rope, table); });
  }
  void Embed(const EmbedArgs& args) override {
    Call("embed", [&] { inner_.Embed(args); });
  }
  // Linear products are told apart by their shape.
  void Linear(const LinearArgs& args) override {
    const std::string name =
        "linear " + std::to_string(args.weight->out) + "x" + std::to_string(args.weight->in);
    Call(name, [&] { inner_.Linear(args); });
  }
  bool TakesTogether(std::span<const LinearArgs> products) const override {
    return inner_.TakesTogether(products);
  }
  void LinearTogether(std::span<const LinearArgs> products) override {
    std::string name = "linear together";
    for (const LinearArgs& args : products) name += ' ' + std::to_string(args.weight->out);
    Call(name, [&] { inner_.LinearTogether(products); });
  }
  void RmsNorm(const RmsNormArgs& args) override {
    Call("rms_norm", [&] { inner_.RmsNorm(args); });
  }
  bool InsertCommits(const StepView& step) const override { return inner_.InsertCommits(step); }
  void NormRopeInsert(const NormRopeInsertArgs& args) override {
    Call("norm_rope_insert", [&] { inner_.NormRopeInsert(args); });
  }
  void WindowCommit(const WindowCommitArgs& args) override {
    Call("window_commit", [&] { inner_.WindowCommit(args); });
  }
  void Compressor(const CompressorArgs& args) override {
    Call("compressor", [&] { inner_.Compressor(args); });
  }
  void Indexer(const IndexerArgs& args) override {
    Call("indexer", [&] { inner_.Indexer(args); });
  }
  void SparseAttention(const SparseAttentionArgs& args) override {
    const char* name = args.compressed.base == nullptr ? "sparse_attention swa"
                       : args.selected == nullptr      ? "sparse_attention hca"
                                                       : "sparse_attention csa";
    Call(name, [&] { inner_.SparseAttention(args); });
  }
  void OutputProjection(const OutputProjectionArgs& args) override {
    Call("output_projection", [&] { inner_.OutputProjection(args); });
  }
  void HyperConnection(const HyperConnectionArgs& args) override {
    Call("hyper_connection", [&] { inner_.HyperConnection(args); });
  }
  void Router(const RouterArgs& args) override {
    Call("router", [&] { inner_.Router(args); });
  }
  void GateAndRoute(const LinearArgs& gate, const RouterArgs& route) override {
    Call("gate and router", [&] { inner_.GateAndRoute(gate, route); });
  }
  void Experts(const ExpertsArgs& args) override {
    Call("experts", [&] { inner_.Experts(args); });
  }
  void Head(const HeadArgs& args) override {
    Call("head", [&] { inner_.Head(args); });
  }
  void Sample(const SampleBatchArgs& args) override {
    Call("sampling", [&] { inner_.Sample(args); });
  }

 protected:
  virtual void Call(const std::string& name, const std::function<void()>& run) = 0;

  Backend& inner_;
};

// Times every op, waiting for each.
class TimedBackend final : public NamedBackend {
 public:
  using NamedBackend::NamedBackend;

  // Seconds per op since the last Reset.
  const std::map<std::string, double>& seconds() const { return seconds_; }
  void Reset() { seconds_.clear(); }

 private:
  void Call(const std::string& name, const std::function<void()>& run) override {
    const auto begin = std::chrono::steady_clock::now();
    run();
    inner_.Wait();
    seconds_[name] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  std::map<std::string, double> seconds_;
};

// Leaves out the ops of one name: what a step takes less without them is what they cost where they
// stand, beside and between the others.
class PartialBackend final : public NamedBackend {
 public:
  using NamedBackend::NamedBackend;

  void Branch(int lane) override { inner_.Branch(lane); }
  void Await(int other) override { inner_.Await(other); }
  void Join() override { inner_.Join(); }
  void LeaveOut(std::string name) { left_out_ = std::move(name); }
  // Every name called so far.
  const std::set<std::string>& names() const { return names_; }

 private:
  void Call(const std::string& name, const std::function<void()>& run) override {
    names_.insert(name);
    if (name != left_out_) run();
  }

  std::set<std::string> names_;
  std::string left_out_;
};

}  // namespace fathom::ops
