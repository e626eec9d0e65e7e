#include <fmt/format.h>

#include "cache/what_if.h"
#include "core/amounts.h"

namespace fathom {
namespace {

std::string FormatsName(const CacheOptions& cache) {
  return fmt::format("{}/{}", KvDTypeName(cache.kv), IndexDTypeName(cache.index));
}

bool Limited(const PlanRequest& request) {
  return request.memory >= 0 || request.cache_memory >= 0;
}

// One row a context, one column a pair of formats: the lines come context by context.
std::string ContextTable(const WhatIf& what_if) {
  std::string text = "one sequence, rows and windows, by formats of cache/indexer\n";
  std::string header = fmt::format("  {:>9}", "context");
  std::string rows;
  const int64_t first = what_if.contexts.front().context;
  int64_t context = 0;
  for (const ContextLine& line : what_if.contexts) {
    if (line.context == first) header += fmt::format("{:>29}", FormatsName(line.cache) + " B");
    if (line.context != context) {
      context = line.context;
      rows += fmt::format("{}  {:>9}", rows.empty() ? "" : "\n", Grouped(context));
    }
    rows += fmt::format("{:>16}{:>13}", Grouped(line.bytes), Amount(line.bytes));
  }
  return text + header + "\n" + rows + "\n";
}

std::string BatchTable(const WhatIf& what_if) {
  std::string text = fmt::format("batches of sequences, {}: what the pools must hold\n",
                                 FormatsName(what_if.request.cache));
  text += fmt::format("  {:>9}{:>7}{:>11}{:>7}{:>9}{:>22}{:>14}{:>7}\n", "context", "batch",
                      "blocks", "slots", "bundles", "bytes", "", "fits");
  for (const BatchLine& line : what_if.batches) {
    const char* fits = !Limited(what_if.request) ? "-" : line.fits ? "yes" : "no";
    text += fmt::format("  {:>9}{:>7}{:>11}{:>7}{:>9}{:>22}{:>14}{:>7}\n", Grouped(line.context),
                        line.batch, Grouped(line.pools.blocks), line.pools.slots,
                        line.pools.bundles, Grouped(line.bytes), Amount(line.bytes), fits);
  }
  return text;
}

std::string BlockSizeTable(const WhatIf& what_if) {
  std::string text =
      "block sizes: bytes of pages and block; tokens between prefix hits, tokens lost at the "
      "tail\n";
  text += fmt::format("  {:>6}  {:<10}{:>9}{:>9}{:>8}{:>11}{:>9}{:>9}{:>7}{:>11}\n", "tokens",
                      "formats", "csa_kv", "index_k", "hca_kv", "block", "padding", "", "hits",
                      "tail up to");
  for (const BlockSizeLine& line : what_if.block_sizes) {
    text +=
        fmt::format("  {:>6}  {:<10}{:>9}{:>9}{:>8}{:>11}{:>9}{:>7.2f} %{:>7}{:>11}\n",
                    Grouped(line.cache.block_tokens), FormatsName(line.cache),
                    Grouped(line.csa_page), Grouped(line.index_page), Grouped(line.hca_page),
                    Grouped(line.block_bytes), Grouped(line.padding_bytes), line.padding_percent(),
                    Grouped(line.hit_granularity), Grouped(line.tail_waste));
  }
  return text;
}

std::string GpuTable(const WhatIf& what_if) {
  const bool limited = Limited(what_if.request);
  std::string text =
      "GPUs as TP 1, EP n: routed experts are divided, all else lies on every one; of one GPU\n";
  text += fmt::format("  {:>5}{:>20}{:>13}{:>13}", "GPUs", "weights B", "", "workspaces");
  if (limited) text += fmt::format("{:>13}{:>25}", "cache", "sequences on all");
  text += "\n";
  for (const GpuLine& line : what_if.gpus) {
    text += fmt::format("  {:>5}{:>20}{:>13}{:>13}", line.gpus, Grouped(line.weight_bytes),
                        Amount(line.weight_bytes), Amount(line.workspace_bytes));
    if (line.shortfall > 0) {
      text += fmt::format("   does not fit: {} more", Amount(line.shortfall));
    } else if (limited) {
      text += fmt::format(
          "{:>13}{:>25}", Amount(line.pool_bytes),
          fmt::format("{} of {}", Grouped(line.sequences), Grouped(what_if.request.context)));
    }
    text += "\n";
  }
  return text;
}

}  // namespace

std::string WhatIfText(const WhatIf& what_if) {
  return ContextTable(what_if) + "\n" + BatchTable(what_if) + "\n" + BlockSizeTable(what_if) +
         "\n" + GpuTable(what_if);
}

}  // namespace fathom
