// Movements of cache memory that the prefix cache decides and the executor carries out, in order
// and before the next step. Bookkeeping never touches the memory itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fathom {

struct CacheOp {
  enum class Kind : uint8_t {
    kClearSlot,         // slot `to`
    kSaveSlot,          // slot `from` -> bundle `to`, at `tokens` tokens
    kRestoreSlot,       // bundle `from` -> slot `to`
    kCopyBlock,         // block -> block
    kBlockToHost,       // block -> host block
    kBlockFromHost,     // host block -> block
    kBundleToHost,      // bundle -> host bundle
    kBundleFromHost,    // host bundle -> bundle
    kBlockFromBuffer,   // `buffer` -> block
    kBundleFromBuffer,  // `buffer` -> bundle
  };
  Kind kind{};
  int32_t from = -1;
  int32_t to = -1;
  int64_t tokens = 0;  // of kSaveSlot, kRestoreSlot and bundles: what is in it depends on them
  std::shared_ptr<const std::vector<std::byte>> buffer;
};

}  // namespace fathom
