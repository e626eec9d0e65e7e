#include "core/status.h"

#include <cstdio>
#include <cstdlib>

namespace fathom {

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "fathom: internal error: %s:%d: %s does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace fathom
