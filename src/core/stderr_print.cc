#include "core/stderr_print.h"

#include <cstdio>

namespace fathom {

void WriteStderr(std::string_view text) noexcept {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace fathom
