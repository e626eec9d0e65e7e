#include "cache/plan_text.h"

#include <fmt/format.h>

#include "core/amounts.h"

namespace fathom {
namespace {

// "  name            1,234 B   1.205 KiB  note"
std::string Line(std::string_view name, int64_t bytes, std::string_view note = {}) {
  std::string line =
      fmt::format("  {:<22}{:>19} B {:>12}  {}", name, Grouped(bytes), Amount(bytes), note);
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

double Percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole);
}

std::string Header(const std::string& name, const ModelConfig& config, const MemoryPlan& plan) {
  const PlanRequest& request = plan.request;
  std::string text = fmt::format(
      "{}\n{} layers ({} SWA, {} CSA/c4a, {} HCA/c128a), {} experts, {} heads, top-{}\n", name,
      config.num_layers, config.count(LayerKind::kSwa), config.count(LayerKind::kCsa),
      config.count(LayerKind::kHca), config.num_experts, config.num_heads, config.index_top_k);
  text += fmt::format("context {}, {} of them at once, --max-num-seqs {}, steps of {} tokens, {}\n",
                      Grouped(request.context), request.sequences, request.slots,
                      request.step_tokens, request.on_gpu ? "GPU" : "CPU");
  if (request.gpus > 1) {
    text += fmt::format(
        "{} GPUs as TP 1, EP {}: routed experts are divided, all else and a cache of its own lie\n"
        "on each; sizes are those of one GPU\n",
        request.gpus, request.gpus);
  }
  return text;
}

std::string Comparisons(const MemoryPlan& plan, std::span<const Comparison> comparisons) {
  if (comparisons.empty()) return "";
  std::string text = fmt::format("\nthe cache of one sequence of {} tokens elsewhere\n",
                                 Grouped(plan.request.context));
  for (const Comparison& c : comparisons) {
    text += Line(c.name, c.bytes,
                 fmt::format("{:.2f} times ({:.2f} without windows)", c.ratio, c.ratio_rows));
    text += fmt::format("    {} layers of {}, {} B a token\n", c.layers, c.what,
                        Grouped(c.bytes_per_token));
  }
  return text;
}

}  // namespace

std::string_view RowFormatName(ops::RowFormat format) {
  switch (format) {
    case ops::RowFormat::kF32: return "float32";
    case ops::RowFormat::kBf16: return "bf16";
    case ops::RowFormat::kFp8Main: return "fp8, rope bf16";
    case ops::RowFormat::kFp8Index: return "fp8";
    case ops::RowFormat::kFp4Index: return "mxfp4";
  }
  return "?";
}

std::string WeightTable(const MemoryPlan& plan) {
  const WeightBudget& weights = plan.weights;
  const int gpus = plan.request.gpus;
  std::string text =
      fmt::format("weights{:>17}{:>19} B\n", "tensors", gpus > 1 ? "of one GPU" : "");
  for (int i = 0; i < kWeightKinds; ++i) {
    const auto kind = static_cast<WeightKind>(i);
    const WeightBudget::Kind& of = weights.of(kind);
    if (of.tensors == 0) continue;
    std::string name(WeightKindName(kind));
    std::string note;
    if (kind == WeightKind::kExperts) {
      note = weights.experts_fp8 ? "fp8" : weights.format_assumed ? "fp4 (assumed)" : "fp4";
      if (gpus > 1) {
        note +=
            fmt::format(", {} of {}", (weights.num_experts + gpus - 1) / gpus, weights.num_experts);
      }
    }
    if (kind == WeightKind::kDrafters) note = fmt::format("{} B not loaded", Grouped(of.bytes));
    const int64_t bytes = weights.per_gpu(kind, gpus);
    text += fmt::format("  {:<15}{:>7}{:>19} B {:>12}  {}", name, Grouped(of.tensors),
                        Grouped(bytes), Amount(bytes), note);
    text.erase(text.find_last_not_of(' ') + 1);
    text += "\n";
  }
  text += fmt::format("  {:<15}{:>7}{:>19} B {:>12}", "together", Grouped(weights.tensors),
                      Grouped(plan.weight_bytes), Amount(plan.weight_bytes));
  if (plan.weight_bytes != weights.bytes) {
    text += fmt::format("  checkpoint {} B", Grouped(weights.bytes));
  }
  return text + "\n";
}

std::string CacheTable(const Geometry& geometry) {
  std::string text = fmt::format("cache, blocks of {} tokens\n", geometry.options.block_tokens);
  text += fmt::format("  {:<12}{:>6}  {:<15}{:>7}{:>7}{:>11}{:>18}\n", "kind", "layers", "format",
                      "row B", "rows", "page B", "padding");
  for (const KindGeometry& kind : geometry.kinds) {
    if (kind.layers.empty()) continue;
    text += fmt::format("  {:<12}{:>6}  {:<15}{:>7}{:>7}{:>11}{:>9} ({:>4.1f} %)  {}\n",
                        CacheKindName(kind.kind), kind.layers.size(), RowFormatName(kind.format),
                        Grouped(kind.row_bytes), kind.rows_per_page, Grouped(kind.page_bytes),
                        kind.padding_bytes, Percent(kind.padding_bytes, kind.page_bytes),
                        kind.block_kind ? "of a block" : "of a slot");
  }
  return text;
}

std::string SequenceTable(const MemoryPlan& plan) {
  const SequenceBytes& one = plan.sequence;
  std::string text =
      fmt::format("one sequence of {} tokens: {} rows of each CSA layer, {} of each HCA layer\n",
                  Grouped(plan.request.context), Grouped(one.csa_rows), Grouped(one.hca_rows));
  text += Line("compressed rows", one.rows, fmt::format("{} B a token", one.bytes_per_token));
  text += Line("windows", one.window, "128 rows of every layer, at any length");
  text += Line("together", one.total());
  text += Line("in blocks", one.block_bytes,
               fmt::format("{} x {} B", Grouped(one.blocks), Grouped(plan.geometry.block_bytes)));
  text += Line("in a slot", one.slot_bytes, "windows and compressor states");
  text += Line("a bundle", plan.bundle_bytes,
               fmt::format("a saved slot; at most {} B", Grouped(plan.bundle_unit)));
  return text;
}

std::string WorkspaceTable(const Workspaces& work) {
  std::string text = "workspaces of a step, at any context\n";
  text += Line("activations", work.activations);
  text += Line("logits", work.logits);
  text += Line("step arrays", work.step_arrays);
  text += Line("kernel scratch", work.kernel_scratch,
               fmt::format("at most; of it the indexer {}", Amount(work.indexer_scratch)));
  if (work.graphs > 0) text += Line("captured graphs", work.graphs, "at most");
  text += Line("together", work.bytes());
  return text;
}

std::string PoolTable(const MemoryPlan& plan) {
  const Geometry& geometry = plan.geometry;
  const PoolSizes& pools = plan.pools;
  std::string text = "reserved for the cache\n";
  const auto pool = [&](const char* name, int64_t count, int64_t unit, const std::string& note) {
    text +=
        Line(name, count * unit, fmt::format("{} x {} B{}", Grouped(count), Grouped(unit), note));
  };
  pool("blocks", pools.blocks, geometry.block_bytes,
       fmt::format(", {} tokens", Grouped(pools.blocks * geometry.options.block_tokens)));
  pool("slots", pools.slots, geometry.slot_bytes, "");
  pool("bundles", pools.bundles, plan.bundle_unit, "");
  text += Line("together", plan.pool_bytes());
  return text;
}

std::string ConcurrencyTable(const MemoryPlan& plan) {
  if (!plan.fits()) return "";
  std::string text = "sequences that run together, of\n";
  for (const Concurrency& line : plan.concurrency) {
    text += fmt::format("  {:>10} tokens {:>10}", Grouped(line.tokens), Grouped(line.in_pools));
    if (plan.cache_memory >= 0) {
      text += fmt::format("   at most {} with --max-num-seqs for that length", Grouped(line.most));
    }
    text += "\n";
  }
  if (plan.request.gpus > 1) text += fmt::format("  on each of {} GPUs\n", plan.request.gpus);
  return text;
}

std::string Verdict(const MemoryPlan& plan, const PlanRemedies& remedies) {
  const int64_t fixed = plan.weight_bytes + plan.workspaces.bytes();
  const PlanRequest& request = plan.request;
  if (!plan.limited()) {
    return fmt::format("needs {}; give --memory to see what fits",
                       BytesAndAmount(plan.total_bytes()));
  }
  if (plan.fits()) {
    std::string text = fmt::format("fits: {} reserved", BytesAndAmount(plan.total_bytes()));
    if (request.memory >= 0) text += fmt::format(" of {}", BytesAndAmount(request.memory));
    return text;
  }
  std::string text =
      fmt::format("does not fit: {} more are needed", BytesAndAmount(plan.shortfall));
  if (request.memory >= 0 && fixed > request.memory) {
    text += fmt::format("\nweights and workspaces alone take {}", BytesAndAmount(fixed));
    text += fmt::format("\nof weights, {} would have to be offloaded, which Fathom does not do",
                        BytesAndAmount(fixed - request.memory));
  }
  const std::string would = RemedyText(remedies);
  if (!would.empty()) text += "\nwould fit with " + would;
  return text;
}

std::string PlanTables(const MemoryPlan& plan) {
  std::string text;
  for (const std::string& part :
       {WeightTable(plan), CacheTable(plan.geometry), SequenceTable(plan),
        WorkspaceTable(plan.workspaces), PoolTable(plan), ConcurrencyTable(plan)}) {
    if (!part.empty()) text += "\n" + part;
  }
  return text + "\n" + Line("in all", plan.total_bytes(), "weights, workspaces and cache");
}

std::string PlanText(const std::string& name, const ModelConfig& config, const MemoryPlan& plan,
                     std::span<const Comparison> comparisons) {
  return Header(name, config, plan) + PlanTables(plan) + Comparisons(plan, comparisons) + "\n" +
         Verdict(plan, Remedies(config, plan)) + "\n";
}

}  // namespace fathom
