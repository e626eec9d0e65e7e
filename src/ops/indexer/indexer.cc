#include "ops/indexer/indexer.h"

namespace fathom::ops {

// Tokens are independent of each other: each is the contract's own loops on one thread.
void IndexerCpu(const IndexerArgs& args, ThreadPool& pool) {
  pool.ParallelFor(args.step->num_tokens, 1, [&](int64_t begin, int64_t end, int) {
    StepView step = *args.step;
    step.position += begin;
    step.sequence += begin;
    step.num_tokens = static_cast<int32_t>(end - begin);
    IndexerArgs part = args;
    part.step = &step;
    part.q.data = args.q.f32_row(begin);
    part.w.data = args.w.f32_row(begin);
    part.rope = args.rope + begin * kRopeDim;
    part.selected = args.selected + begin * args.top_k;
    part.counts = args.counts + begin;
    if (args.scores != nullptr) part.scores = args.scores + begin * args.scores_stride;
    IndexerReference(part);
  });
}

}  // namespace fathom::ops
