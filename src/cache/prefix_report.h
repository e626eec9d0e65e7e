// What the prefix cache did for one request, in numbers and in a sentence.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fathom {

// Why not more of a prompt was found.
enum class MissReason : uint8_t {
  kNone,               // everything but the last token, which is always computed
  kDisabled,           // --no-enable-prefix-caching, or the request asks for prompt_logprobs
  kNothingCached,      // no prompt with this beginning is known
  kFirstBlockDiffers,  // a known prompt shares diverged_at tokens, less than could be resumed
  kDiverged,           // the known prompts go on differently from token diverged_at
  kEnded,              // the known prompt ends at token diverged_at, this one goes on
  kNoBundle,           // rows reach further, but no windows were saved there
  kBundleEvicted,      // windows were saved there and have been evicted, seconds_ago
  kBlockEvicted,       // the rows that follow have been evicted, seconds_ago
  kSaltDiffers,        // the same tokens are cached under another salt
  kTierFailed,         // host or disk could not give them back: `detail`
};
inline constexpr int kMissReasons = 11;
std::string_view MissReasonName(MissReason reason);  // "diverged", ... : metric labels

struct PrefixReport {
  int64_t prompt_tokens = 0;
  int64_t matched_tokens = 0;  // as far as the token ids agree with a cached path
  int64_t matched_blocks = 0;  // whole blocks within
  int64_t boundary = 0;        // resumed at: tokens that were not computed again
  // Of what follows, tokens run again for their windows alone: their rows were there.
  int64_t rebuilt = 0;
  // Where the rows of [0, boundary) came from, in tokens; they add up to boundary.
  int64_t device_tokens = 0, host_tokens = 0, disk_tokens = 0;
  MissReason reason = MissReason::kNothingCached;
  int64_t diverged_at = 0;
  double seconds_ago = 0;
  std::string detail;

  // "diverged at token 5,120", "bundle evicted 40 s ago", ...
  std::string Reason() const;
};

}  // namespace fathom
