#include "cache/prefix_report.h"

#include <fmt/format.h>

#include "core/amounts.h"

namespace fathom {
std::string_view MissReasonName(MissReason reason) {
  switch (reason) {
    case MissReason::kNone: return "none";
    case MissReason::kDisabled: return "disabled";
    case MissReason::kNothingCached: return "nothing_cached";
    case MissReason::kFirstBlockDiffers: return "first_block_differs";
    case MissReason::kDiverged: return "diverged";
    case MissReason::kEnded: return "ended";
    case MissReason::kNoBundle: return "no_bundle";
    case MissReason::kBundleEvicted: return "bundle_evicted";
    case MissReason::kBlockEvicted: return "block_evicted";
    case MissReason::kSaltDiffers: return "salt_differs";
    case MissReason::kTierFailed: return "tier_failed";
  }
  return "unknown";
}

std::string PrefixReport::Reason() const {
  switch (reason) {
    case MissReason::kNone: return "found whole";
    case MissReason::kDisabled: return "prefix caching is off for this request";
    case MissReason::kNothingCached: return "no prompt with this beginning is cached";
    case MissReason::kFirstBlockDiffers:
      return fmt::format("first block differs: {} tokens in", Grouped(diverged_at));
    case MissReason::kDiverged: return fmt::format("diverged at token {}", Grouped(diverged_at));
    case MissReason::kEnded:
      return fmt::format("the cached path ends at token {}", Grouped(diverged_at));
    case MissReason::kNoBundle:
      return fmt::format("rows reach token {}, but no bundle was saved after token {}",
                         Grouped(matched_tokens), Grouped(boundary));
    case MissReason::kBundleEvicted: return fmt::format("bundle evicted {:.0f} s ago", seconds_ago);
    case MissReason::kBlockEvicted: return fmt::format("block evicted {:.0f} s ago", seconds_ago);
    case MissReason::kSaltDiffers: return "salt differs";
    case MissReason::kTierFailed: return fmt::format("not restored: {}", detail);
  }
  return "unknown";
}

}  // namespace fathom
