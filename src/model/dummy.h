// Dummy weights (--load-format dummy): the shapes of config.json with plausible values, for
// measuring speed and memory of a model whose weights are not at hand.
#pragma once

#include <cstdint>

#include "core/thread_pool.h"
#include "model/checkpoint.h"
#include "model/config.h"

namespace fathom {

// Every tensor of the main model. Values are a function of (seed, original tensor name, element
// index) alone: the same for any number of threads, and a tensor keeps its values when other parts
// of the config change. Norms lie near 1, matrices have rms 1/sqrt(in), ue8m0 scales match their
// codes, tid2eid has distinct experts per token. Counts and bytes include the drafters, which are
// not generated. kResourceExhausted when the memory cannot be had.
Expected<TensorSet> DummyTensors(ModelConfig& config, uint64_t seed, ThreadPool& pool);

}  // namespace fathom
