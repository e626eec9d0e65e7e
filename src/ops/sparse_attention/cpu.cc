#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

void SparseAttentionCpu(const SparseAttentionArgs& args, ThreadPool& pool) {
  SparseAttentionReference(args);
}

}  // namespace fathom::ops
